//! A treap over extents, linked by index: sorted by address, balanced by a hash of the start page,
//! so that its shape depends on its contents alone. It holds an arena's partly used slabs.
use super::{ExtentId, Extents};

/// A tree of extents by start page.
pub(crate) struct Tree {
    root: ExtentId,
}

/// What decides which of two nodes is higher: a hash, of the start page here.
pub(super) fn priority(key: u32) -> u32 {
    let mixed = key.wrapping_mul(0x9E37_79B1);
    (mixed ^ (mixed >> 15)).wrapping_mul(0x85EB_CA77)
}

impl Tree {
    pub(crate) const fn new() -> Self {
        Self { root: 0 }
    }

    pub(crate) fn insert(&mut self, extents: &Extents, id: ExtentId) {
        let key = extents.get(id).start();
        let mine = priority(extents.get(id).start());
        let mut link = Link::Root;
        let mut at = self.root;
        while at != 0 && priority(extents.get(at).start()) >= mine {
            link = if key < extents.get(at).start() { Link::Left(at) } else { Link::Right(at) };
            at = self.follow(extents, link);
        }
        let (left, right) = self.split(extents, at, key);
        let node = extents.get(id);
        node.set_left(left);
        node.set_right(right);
        self.set(extents, link, id);
    }

    /// Takes `id` out; it must be in the tree, with the start it had when it was put in.
    pub(crate) fn remove(&mut self, extents: &Extents, id: ExtentId) {
        let key = extents.get(id).start();
        let mut link = Link::Root;
        let mut at = self.root;
        while at != id {
            debug_assert!(at != 0, "extent {id} is not in the tree");
            if at == 0 {
                return;
            }
            link = if key < extents.get(at).start() { Link::Left(at) } else { Link::Right(at) };
            at = self.follow(extents, link);
        }
        let node = extents.get(id);
        let joined = self.join(extents, node.left(), node.right());
        self.set(extents, link, joined);
        node.set_left(0);
        node.set_right(0);
    }

    /// The extent with the lowest address, or 0.
    pub(crate) fn lowest(&self, extents: &Extents) -> ExtentId {
        let mut lowest = 0;
        let mut at = self.root;
        while at != 0 {
            lowest = at;
            at = extents.get(at).left();
        }
        lowest
    }

    fn follow(&self, extents: &Extents, link: Link) -> ExtentId {
        match link {
            Link::Root => self.root,
            Link::Left(of) => extents.get(of).left(),
            Link::Right(of) => extents.get(of).right(),
        }
    }

    fn set(&mut self, extents: &Extents, link: Link, to: ExtentId) {
        match link {
            Link::Root => self.root = to,
            Link::Left(of) => extents.get(of).set_left(to),
            Link::Right(of) => extents.get(of).set_right(to),
        }
    }

    /// Splits the subtree at `at` into the keys below `key` and those above.
    fn split(&self, extents: &Extents, mut at: ExtentId, key: u32) -> (ExtentId, ExtentId) {
        let (mut left, mut right) = (0, 0);
        let (mut left_end, mut right_end) = (0, 0);
        while at != 0 {
            let node = extents.get(at);
            if extents.get(at).start() < key {
                if left_end == 0 {
                    left = at
                } else {
                    extents.get(left_end).set_right(at)
                }
                left_end = at;
                at = node.right();
            } else {
                if right_end == 0 {
                    right = at
                } else {
                    extents.get(right_end).set_left(at)
                }
                right_end = at;
                at = node.left();
            }
        }
        if left_end != 0 {
            extents.get(left_end).set_right(0);
        }
        if right_end != 0 {
            extents.get(right_end).set_left(0);
        }
        (left, right)
    }

    /// Joins two subtrees, all keys of `left` below those of `right`.
    fn join(&mut self, extents: &Extents, mut left: ExtentId, mut right: ExtentId) -> ExtentId {
        let mut root = 0;
        let mut link = Link::Root;
        loop {
            let take_left = match (left, right) {
                (0, _) => false,
                (_, 0) => true,
                _ => priority(extents.get(left).start()) >= priority(extents.get(right).start()),
            };
            let next = if take_left { left } else { right };
            match link {
                Link::Root => root = next,
                other => self.set(extents, other, next),
            }
            if left == 0 || right == 0 {
                return root;
            }
            if take_left {
                link = Link::Right(left);
                left = extents.get(left).right();
            } else {
                link = Link::Left(right);
                right = extents.get(right).left();
            }
        }
    }
}

/// A place in a tree where a subtree hangs.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Left(ExtentId),
    Right(ExtentId),
}
