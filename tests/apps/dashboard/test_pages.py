"""The files of a page: those with a media type, each once, read when the server starts."""

from megatron.apps.dashboard.pages import PAGE_HEADERS, SHARED, page_files


def test_shared_files_and_the_page_s_own(tmp_path):
    (tmp_path / "index.html").write_text("<p>one</p>")
    (tmp_path / "theme.js").write_text("own")
    (tmp_path / "page.py").write_text("secret")
    (tmp_path / "LICENSE").write_text("not sent")
    files = page_files(tmp_path)
    (tmp_path / "index.html").write_text("later")
    assert files["index.html"] == (b"<p>one</p>", "text/html; charset=utf-8")
    assert files["theme.js"].content == b"own"
    assert files["base.css"].content == (SHARED / "base.css").read_bytes()
    assert not {"page.py", "LICENSE"} & files.keys()


def test_policy_allows_nothing_from_elsewhere():
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "*" not in policy
