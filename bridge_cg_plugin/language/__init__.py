"""The language model of a vision-language model, from token embeddings to the loss of every token, on graphs."""
