"""HTML pages of one file: without scripts of others, without a network; light, dark and on paper."""

import base64
import hashlib
from html import escape

_STYLE = """
:root { color-scheme: light dark; --bar: #4a7ebb; --rest: #4a7ebb55;
  --bad: light-dark(#c0392b, #ff8a7a); --mark: light-dark(#a66300, #f0b35a) }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color: light-dark(#111, #eee); background: light-dark(#fff, #121212) }
table { border-collapse: collapse; width: 100% } th { text-align: left }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #8884; vertical-align: top }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid } tr { break-inside: avoid } }
"""


def html_page(title: str, body: str, style: str = "", script: str = "") -> str:
    """Return a complete page. Its policy allows this style and script, and nothing from a network.

    Args:
        title: text of the title and of the first heading.
        body: HTML below the heading.
        style: further rules of its style sheet.
        script: runs after the body was read. Default: none.
    """
    shown, policy = escape(title), "default-src 'none'; style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        body += f"<script>{script}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{shown}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{_STYLE}{style}</style></head>\n<body><main><h1>{shown}</h1>\n{body}</main></body></html>\n"
    )
