"""The commands of the command line: options in, one call into the pipeline, a rendering out."""
