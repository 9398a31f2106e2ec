"""The language model of a vision-language model as one region."""
