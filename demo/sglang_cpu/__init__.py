"""A real SGLang server without a GPU: recipe (folders, flags), installer, tiny model. No file of SGLang is edited."""
