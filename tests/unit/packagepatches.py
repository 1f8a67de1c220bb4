"""Patches that change any file of the small package: the same change as a diff and as a script."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fleetdump.agent.specs import PackageChange, PatchSpec
from tests.unit.engineinstall import Install, compile_model, install, spec

EXTRA = {
    "sglang/srt/crlf.py": b"one = 1\r\ntwo = 2\r\nthree = 3\r\n",
    "sglang/srt/latin.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\nx = 1\n",
    "sglang/srt/gone.py": b"def f():\n\treturn 1\n",
    "sglang/srt/moved.py": b"a = 1\nb = 2\nc = 3\n",
    "sglang/srt/empty.py": b"",
    "sglang/srt/table.json": b'{"a": 1}',
}
DIFF = b"""\
diff --git a/python/sglang/srt/models/tiny.py b/python/sglang/srt/models/tiny.py
--- a/python/sglang/srt/models/tiny.py
+++ b/python/sglang/srt/models/tiny.py
@@ -1,4 +1,5 @@
 \"\"\"A model.\"\"\"
 import math
+import sglang.srt.deep.down.made
\x20
 class TinyModel:
diff --git a/python/sglang/srt/deep/down/made.py b/python/sglang/srt/deep/down/made.py
new file mode 100644
--- /dev/null
+++ b/python/sglang/srt/deep/down/made.py
@@ -0,0 +1,2 @@
+VERSION = "@VERSION@"
+\t# a tab
diff --git a/python/sglang/srt/gone.py b/python/sglang/srt/gone.py
deleted file mode 100644
--- a/python/sglang/srt/gone.py
+++ /dev/null
@@ -1,2 +0,0 @@
-def f():
-\treturn 1
diff --git a/python/sglang/srt/empty.py b/python/sglang/srt/empty.py
deleted file mode 100644
index e69de29..0000000
diff --git a/python/sglang/srt/moved.py b/python/sglang/srt/deep/moved.py
rename from python/sglang/srt/moved.py
rename to python/sglang/srt/deep/moved.py
diff --git a/python/sglang/srt/crlf.py b/python/sglang/srt/crlf.py
--- a/python/sglang/srt/crlf.py
+++ b/python/sglang/srt/crlf.py
@@ -1,3 +1,3 @@
 one = 1\r
-two = 2\r
+two = 22\r
 three = 3\r
--- sglang/srt/latin.py
+++ sglang/srt/latin.py
@@ -1,3 +1,3 @@
 # -*- coding: latin-1 -*-
 # caf\xe9
-x = 1
+x = 2
--- sglang/srt/table.json
+++ sglang/srt/table.json
@@ -1 +1 @@
-{"a": 1}
\\ No newline at end of file
+{"a": 2}
\\ No newline at end of file
"""
SCRIPT = b"""\
import importlib.util, os, sys
package = os.path.dirname(importlib.util.find_spec("sglang").origin)
assert os.path.samefile(package, sys.argv[1]), (package, sys.argv)
print("patching", package)

def change(name, old, new):
    path = os.path.join(package, name)
    with open(path, "rb") as file:
        data = file.read()
    assert data.count(old) == 1, (name, data)
    with open(path, "wb") as file:
        file.write(data.replace(old, new))

change("srt/models/tiny.py", b"import math\\n", b"import math\\nimport sglang.srt.deep.down.made\\n")
change("srt/crlf.py", b"= 2", b"= 22")
change("srt/latin.py", b"x = 1", b"x = 2")
change("srt/table.json", b"1", b"2")
os.makedirs(package + "/srt/deep/down")
with open(package + "/srt/deep/down/made.py", "w") as file:
    file.write('VERSION = "@VERSION@"\\n\\t# a tab\\n')
os.unlink(package + "/srt/gone.py")
os.unlink(package + "/srt/empty.py")
os.rename(package + "/srt/moved.py", package + "/srt/deep/moved.py")
"""
KINDS = {"diff": ("all.patch", DIFF), "script": ("apply_all.py", SCRIPT)}


def engine_with_extra(root: Path, release: str = "0.5.20") -> Install:
    """The small installation with more files, and bytecode of one that is patched and one that is deleted."""
    made = install(root, release, extra=EXTRA)
    compile_model(made)
    cache = made.site / "sglang" / "srt" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "gone.cpython-311.pyc").write_bytes(b"bytecode")
    return made


def change_spec(data: bytes, kind: str = "diff", version: str = "1", name: str = "") -> PatchSpec:
    """A patch of one diff or script."""
    change = PackageChange(kind, name or KINDS[kind][0], base64.b64encode(data).decode(), "0.5.0", "0.5.20", ["0.5.20"])
    digest = hashlib.sha256(data + version.encode()).hexdigest()
    return PatchSpec("all", version, digest, [], changes=[change])


def all_files(kind: str, version: str = "1") -> PatchSpec:
    """The patch that changes, makes, deletes and renames files, as a diff or a script; or ``edits`` of old."""
    if kind == "edits":
        return spec(version)
    return change_spec(KINDS[kind][1].replace(b"@VERSION@", version.encode()), kind, version)
