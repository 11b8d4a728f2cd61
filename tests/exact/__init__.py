"""The proof of exactness: laws of whole answers, by enumeration."""
