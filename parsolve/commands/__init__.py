"""The commands of the command line, a file each. Only ``click`` loads before a command runs."""
