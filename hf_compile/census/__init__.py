"""Every encoder of the installed Transformers, built tiny, compiled and compared; only the command line imports it."""
