"""The scripted device of headrace.engine.testing: plans carried out on lists; never a model."""
