"""The growth page: a training as a film in one HTML file that needs neither a server nor a connection."""

from sensli.page.data import Curve, Film, page_data
from sensli.page.files import read_history, write_page

__all__ = ["Curve", "Film", "page_data", "read_history", "write_page"]
