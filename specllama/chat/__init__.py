"""Text and tokens, conversations, and the settings of a chat."""
