"""Pages of HTML, style and script, as files: whoever changes them wants an editor's help, and a browser's."""
