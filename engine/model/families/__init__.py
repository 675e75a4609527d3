"""The supported families of models, one file each: a config.json in, a `DecoderSpec` and the tensors' names out."""
