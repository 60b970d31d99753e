"""A server of the Model Context Protocol: questions of a coding agent, answered by the verbs."""
