"""`areal-debug record`: list, show, verify, archive, import and export records."""

from areal_debug.installation import names_of

__getattr__ = names_of("recorder", __name__)
