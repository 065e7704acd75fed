"""Hook of MkDocs: the site has only the pages of docs/, so links to other files become plain text."""

import re
from typing import Any

_PARENT_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page without its links out of docs/. MkDocs calls it for each page."""
    in_docs_itself = "/" not in page.file.src_uri
    return _PARENT_LINK.sub(r"\1", markdown) if in_docs_itself else markdown
