"""Tools that every room shares. Imports no other room."""
