"""The chat command: input, slash commands, answers, rescue."""
