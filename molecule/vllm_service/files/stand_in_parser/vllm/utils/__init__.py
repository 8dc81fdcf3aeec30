"""Part of the stand-in's parser."""
