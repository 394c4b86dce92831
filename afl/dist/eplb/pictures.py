"""Heat maps of rank loads, layers down and ranks across: a PNG without libraries, and an HTML page with figures.

A cell is a rank's load over the layer's average: white at the average, blue below, red above, full red at twice.
"""

import html
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from afl.dist.eplb.metrics import par

# 3 x 5 glyphs, one digit of 0-7 per row, top first
_FONT = {
    " ": "00000", "-": "00700", ".": "00002", "/": "11244", "%": "51245", "=": "07070", "+": "02720", ":": "02020",
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71122",
    "8": "75757", "9": "75717", "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644",
    "G": "34553", "H": "55755", "I": "72227", "J": "11152", "K": "55655", "L": "44447", "M": "57755", "N": "65555",
    "O": "25552", "P": "65644", "Q": "25563", "R": "65655", "S": "34216", "T": "72222", "U": "55557", "V": "55552",
    "W": "55775", "X": "55255", "Y": "55222", "Z": "71247", "_": "00007",
}


class Panel(NamedTuple):
    """One heat map: a title and rank loads float64 [layers, ranks]."""

    title: str
    loads: np.ndarray


def colours(loads: np.ndarray) -> np.ndarray:
    """uint8 [layers, ranks, 3]: a colour for each load over its layer's average.

    >>> colours(np.array([[1.0, 1.0], [0.0, 2.0]]))[0, 0].tolist()
    [255, 255, 255]
    """
    mean = loads.mean(-1, keepdims=True)
    x = np.where(mean > 0, loads / np.where(mean > 0, mean, 1), 1.0) - 1
    up, down = np.clip(x, 0, 1)[..., None], np.clip(-x, 0, 1)[..., None]
    white, red, blue = (np.array(c, np.float64) for c in ((255, 255, 255), (178, 24, 43), (33, 102, 172)))
    return np.rint(white + up * (red - white) + down * (blue - white)).astype(np.uint8)


def png(panels: Sequence[Panel], cell: int = 0) -> bytes:
    """A PNG with the panels side by side.  `cell`: pixels of a cell, 0 fits about 400 pixels per panel."""
    layers, ranks = panels[0].loads.shape
    cell = cell or max(1, min(400 // max(layers, ranks), 24))
    drawn = []
    for p in panels:
        ratio = par(p.loads)
        lines = [p.title.upper(), f"PAR {ratio.mean():.3f} MAX {ratio.max():.3f}"]
        width = max(ranks * cell, 8 * max(map(len, lines)))
        picture = np.full((32 + layers * cell, width, 3), 255, np.uint8)
        for i, text in enumerate(lines):
            _write(picture, text, 2, 3 + 14 * i)
        picture[31, :ranks * cell] = 0
        picture[32:, :ranks * cell] = colours(p.loads).repeat(cell, 0).repeat(cell, 1)
        drawn.append(np.pad(picture, ((6, 6), (8, 8), (0, 0)), constant_values=255))
    image = np.concatenate(drawn, 1)
    raw = np.concatenate([np.zeros((len(image), 1), np.uint8), image.reshape(len(image), -1)], 1)   # filter 0 per row
    head = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(raw.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)


def _write(picture: np.ndarray, text: str, x: int, y: int) -> None:
    """Draw text in dots of 2 x 2 pixels."""
    for i, c in enumerate(text):
        rows = _FONT.get(c, _FONT["-"])
        dots = np.array([[int(r) >> 2 & 1, int(r) >> 1 & 1, int(r) & 1] for r in rows], bool).repeat(2, 0).repeat(2, 1)
        picture[y:y + 10, x + 8 * i:x + 8 * i + 6][dots[:, :max(picture.shape[1] - x - 8 * i, 0)]] = 0


def page(title: str, panels: Sequence[Panel], table: Sequence[Sequence[str]] = ()) -> str:
    """An HTML page: a table whose first row is its head, and a heat map per panel, with figures under the mouse.

    Nothing in it is loaded from elsewhere.
    """
    rows = []
    for i, r in enumerate(table):
        tag = "td" if i else "th"
        rows.append("<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in r) + "</tr>")
    return "\n".join([
        "<!doctype html><html lang=en><meta charset=utf-8>", f"<title>{html.escape(title)}</title>", _STYLE,
        f"<h1>{html.escape(title)}</h1>", f"<table>{''.join(rows)}</table>" if rows else "",
        "<p>A cell is the load of a rank (across) in a layer (down) over the layer's average: white is the average, "
        "red is more, blue is less.</p>", "<main>", *map(_svg, panels), "</main></html>", ""])


_STYLE = """<style>
body{font:14px system-ui;margin:2em}
table{border-collapse:collapse}
td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ccc}
td:first-child,th:first-child{text-align:left}
main{display:flex;flex-wrap:wrap;gap:2em}
figure{margin:0}
svg{border:1px solid #888}
</style>"""


def _svg(p: Panel) -> str:
    layers, ranks = p.loads.shape
    ratio, tint = par(p.loads), colours(p.loads)
    mean = p.loads.mean(-1, keepdims=True)
    over = np.where(mean > 0, p.loads / np.where(mean > 0, mean, 1), 1.0)
    cells = "".join(
        f'<rect x={r} y={i} width=1 height=1 fill="#{tint[i, r].tobytes().hex()}"><title>layer {i}, rank {r}: '
        f'{p.loads[i, r]:.0f} tokens, {over[i, r]:.3f} of average</title></rect>'
        for i in range(layers) for r in range(ranks))
    size = max(4, min(480 // max(layers, ranks), 24))
    return (f"<figure><figcaption>{html.escape(p.title)}: peak over average {ratio.mean():.3f}, worst layer "
            f"{ratio.max():.3f}</figcaption><svg viewBox='0 0 {ranks} {layers}' width={ranks * size} "
            f"height={layers * size} shape-rendering=crispEdges>{cells}</svg></figure>")
