"""The scripted device of headrace.engine.testing: carries out plans on lists; never a model."""
