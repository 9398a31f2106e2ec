"""What the training loop calls to capture: of the encoder, packed documents, the whole language model."""
