"""What an ELF file needs of the system: libraries, and the newest version of the C library's symbols.

A reader of the two tables that say so, which a wheel's tag is made from.
"""

import re
import struct

_DYNAMIC, _VERSIONS_NEEDED = 6, 0x6FFFFFFE
_DT_NEEDED = 1
# What every system with the GNU C library has: manylinux allows wheels to use it without carrying it.
_OF_THE_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s)|ld-linux-[\w-]+)\.so\.\d+$")


def read(data):
    """Names of needed libraries, and names of versions that symbols need, of a 64-bit little-endian file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # Type, offset, bytes and link of each section.
    sections = [
        [struct.unpack_from(kind, data, table + i * size + at)[0] for kind, at in (("<I", 4), ("<Q", 24), ("<Q", 32), ("<I", 40))]
        for i in range(count)
    ]
    libraries, versions = set(), set()
    for kind, offset, length, link in sections:
        if kind not in (_DYNAMIC, _VERSIONS_NEEDED):
            continue
        strings = sections[link][1]

        def text(at, strings=strings):
            return data[strings + at : data.index(b"\0", strings + at)].decode()

        if kind == _DYNAMIC:
            entries = struct.iter_unpack("<QQ", data[offset : offset + length])
            libraries.update(text(value) for tag, value in entries if tag == _DT_NEEDED)
            continue
        at = offset
        while True:
            _, names, _, first, following = struct.unpack_from("<HHIII", data, at)
            name_at = at + first
            for _ in range(names):
                _, _, _, name, next_name = struct.unpack_from("<IHHII", data, name_at)
                versions.add(text(name))
                name_at += next_name
            if not following:
                break
            at += following
    return libraries, versions


def platform_tag(files, machine):
    """The tag of a wheel with these files: the oldest manylinux that has all that they need; what needs another
    library than those of every system, or another C library, runs where it was built only.
    """
    newest = (2, 17)
    for data in files:
        libraries, versions = read(data)
        if not all(_OF_THE_SYSTEM.match(library) for library in libraries):
            return f"linux_{machine}"
        for version in versions:
            number = re.match(r"GLIBC_(\d+)\.(\d+)", version)
            if number:
                newest = max(newest, (int(number[1]), int(number[2])))
            elif version.startswith("GLIBC_"):
                # GLIBC_PRIVATE and the like belong to one build of the C library.
                return f"linux_{machine}"
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"
