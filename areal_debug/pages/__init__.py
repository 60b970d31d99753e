"""Templates, style sheets and scripts of HTML pages, as files."""
