"""The one report of all verbs: what it holds, and how a terminal and a page show it."""
