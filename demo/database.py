#!/usr/bin/env python3
"""SQLite in memory: inserts, an index, joins and aggregates, text and blobs."""
import argparse
import hashlib
import sqlite3


def run(rows):
    db = sqlite3.connect(":memory:")
    db.execute("create table event(id integer primary key, user int, kind text, size int, body blob)")
    db.execute("create table user(id integer primary key, name text)")
    db.executemany("insert into user values(?, ?)", ((u, f"user {u * 7919 % 10007}") for u in range(5000)))
    db.executemany(
        "insert into event values(?, ?, ?, ?, ?)",
        (
            (i, i * 31 % 5000, f"kind {i % 17}", i * 7 % 1009, bytes(i * 13 % 700))
            for i in range(rows)
        ),
    )
    db.execute("create index by_user on event(user, size)")
    digest = hashlib.sha256()
    for query in (
        "select u.name, count(*), sum(e.size), max(length(e.body)) from event e"
        " join user u on u.id = e.user group by u.name order by u.name",
        "select kind, group_concat(size, ',') from event where size < 40 group by kind order by kind",
        "select upper(kind) || '/' || user, body from event where size % 10 = 3 order by 1, id",
    ):
        for row in db.execute(query):
            digest.update(repr(row).encode())
    db.execute("delete from event where id % 3 = 0")
    db.commit()
    db.execute("vacuum")
    digest.update(repr(db.execute("select count(*), sum(size) from event").fetchone()).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=120000)
    print(run(parser.parse_args().rows))
