"""Grammars of guided decoding, on the host: compiled by XGrammar, followed token by token."""
