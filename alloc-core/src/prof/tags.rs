//! What blocks are allocated for: scopes that the program opens, TensorFlow's annotations, users of
//! device memory. A tag is a number from 1; 0 says nothing. Tags are never forgotten, so that a token
//! may be handed to any thread at any time.
use super::table::{Index, Pool, Segments, Shared, hash};
use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use thermalloc_prof_format::component;

/// Slots of the first level.
const SLOTS: usize = 1 << 12;
/// Most tags: names that count up (`step 1`, `step 2`) must not take all memory.
const MOST_TAGS: u32 = 1 << 14;
/// Longest name and region, bytes; more is cut.
pub(crate) const NAME_BYTES: usize = 200;

#[derive(Debug)]
struct Tag {
    parent: AtomicU32,
    /// Source, component, data type.
    what: AtomicU32,
    text: AtomicU32,
    /// Bytes of name and region, plus 1 at the top; 0 while it is being written.
    len: AtomicU32,
}
// SAFETY: atomics.
unsafe impl Shared for Tag {}

/// What a tag says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meaning<'a> {
    pub(crate) parent: u32,
    pub(crate) source: u8,
    pub(crate) component: u8,
    pub(crate) dtype: u16,
    pub(crate) name: &'a [u8],
    pub(crate) region: &'a [u8],
}

impl Meaning<'_> {
    fn what(&self) -> u32 {
        u32::from(self.source) | u32::from(self.component) << 8 | u32::from(self.dtype) << 16
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most NAME_BYTES each")]
    fn len(&self) -> u32 {
        1 << 31 | self.name.len() as u32 | (self.region.len() as u32) << 12
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        [self.name, self.region].into_iter().flat_map(words)
    }
}

/// A text as words, the last one filled up with zero bytes.
fn words(text: &[u8]) -> impl Iterator<Item = u64> {
    text.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    })
}

/// All tags.
#[derive(Debug)]
pub(crate) struct Tags {
    index: Index<SLOTS>,
    tags: Segments<Tag, 16, 1024>,
    texts: Pool<16>,
    count: AtomicU32,
    lost: AtomicU64,
}

impl Tags {
    pub(crate) const fn new() -> Self {
        Self {
            index: Index::new(),
            tags: Segments::new(),
            texts: Pool::new(),
            count: AtomicU32::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// The number of this meaning; where there is no room for another, its parent's.
    pub(crate) fn intern(&self, mut meaning: Meaning<'_>) -> u32 {
        for text in [&mut meaning.name, &mut meaning.region] {
            *text = &text[..text.len().min(NAME_BYTES)];
        }
        let key = u64::from(meaning.parent) << 32 | u64::from(meaning.what());
        let hash = hash([key, u64::from(meaning.len())].into_iter().chain(meaning.words()));
        let found =
            self.index.find_or_insert(hash, |id| self.is(id, &meaning), || self.add(&meaning));
        found.unwrap_or_else(|| {
            self.lost.fetch_add(1, Relaxed);
            meaning.parent
        })
    }

    fn is(&self, id: u32, meaning: &Meaning<'_>) -> bool {
        self.tags.get(id as usize).is_some_and(|tag| {
            let len = meaning.words().count();
            tag.len.load(Acquire) == meaning.len()
                && tag.parent.load(Relaxed) == meaning.parent
                && tag.what.load(Relaxed) == meaning.what()
                && self.texts.load(tag.text.load(Relaxed), len).eq(meaning.words())
        })
    }

    fn add(&self, meaning: &Meaning<'_>) -> Option<u32> {
        let text = self.texts.store(meaning.words().count(), meaning.words())?;
        let id = self.count.fetch_add(1, Relaxed) + 1;
        if id >= MOST_TAGS {
            self.count.fetch_sub(1, Relaxed);
            return None;
        }
        let tag = self.tags.ensure(id as usize)?;
        tag.parent.store(meaning.parent, Relaxed);
        tag.what.store(meaning.what(), Relaxed);
        tag.text.store(text, Relaxed);
        tag.len.store(meaning.len(), Release);
        Some(id)
    }

    /// The highest number so far.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Calls `with` with what a tag says.
    pub(crate) fn read<R>(&self, id: u32, with: impl FnOnce(Meaning<'_>) -> R) -> Option<R> {
        let tag = self.tags.get(id as usize)?;
        let len = tag.len.load(Acquire);
        let (name, region) = ((len & 0xFFF) as usize, (len >> 12 & 0xFFF) as usize);
        if len == 0 || name > NAME_BYTES || region > NAME_BYTES {
            return None;
        }
        let (name_words, region_words) = (name.div_ceil(8), region.div_ceil(8));
        let mut text = [[0u8; 8]; 2 * NAME_BYTES.div_ceil(8)];
        let stored = self.texts.load(tag.text.load(Relaxed), name_words + region_words);
        text.iter_mut().zip(stored).for_each(|(to, word)| *to = word.to_ne_bytes());
        let (first, second) = text.split_at(name_words);
        let [source, component, low, high] = tag.what.load(Relaxed).to_le_bytes();
        Some(with(Meaning {
            parent: tag.parent.load(Relaxed),
            source,
            component,
            dtype: u16::from_le_bytes([low, high]),
            name: &first.as_flattened()[..name],
            region: &second.as_flattened()[..region],
        }))
    }

    /// Whether there is such a tag.
    pub(crate) fn knows(&self, id: u32) -> bool {
        self.tags.get(id as usize).is_some_and(|tag| tag.len.load(Relaxed) != 0)
    }

    /// Names that found no room.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

/// The component that a scope's name begins with: `weights`, or `kv_cache:layer 3`.
pub(crate) fn component_of(name: &[u8]) -> u8 {
    let first = name.split(|&byte| byte == b':' || byte == b'/').next().unwrap_or(name);
    component::find(first).unwrap_or(component::UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn scope<'a>(parent: u32, name: &'a str, region: &'a str) -> Meaning<'a> {
        let (name, region) = (name.as_bytes(), region.as_bytes());
        Meaning { parent, source: 1, component: component_of(name), dtype: 7, name, region }
    }

    #[test]
    fn a_meaning_has_one_number_and_reads_back() {
        static TAGS: Tags = Tags::new();
        let long = "x".repeat(500);
        let meanings = [
            scope(0, "", ""),
            scope(0, "weights", ""),
            scope(1, "weights", ""),
            scope(0, "weight", "s"),
            scope(0, "weights:exactly 8", "output"),
            scope(2, &long, &long),
        ];
        let ids: Vec<_> = meanings.iter().map(|&m| TAGS.intern(m)).collect();
        assert_eq!(ids, (1..=6).collect::<Vec<_>>());
        for (&id, &meaning) in ids.iter().zip(&meanings) {
            assert_eq!(TAGS.intern(meaning), id);
            let cut = |text: &[u8]| text[..text.len().min(NAME_BYTES)].to_vec();
            let same = TAGS.read(id, |read| {
                (read.parent, read.source, read.component, read.dtype)
                    == (meaning.parent, meaning.source, meaning.component, meaning.dtype)
                    && read.name == cut(meaning.name)
                    && read.region == cut(meaning.region)
            });
            assert_eq!(same, Some(true), "{id}");
        }
        assert!(TAGS.knows(6) && !TAGS.knows(7) && !TAGS.knows(0));
        assert_eq!((TAGS.read(7, |_| ()), TAGS.count()), (None, 6));
    }

    #[test]
    fn names_that_count_up_end_at_their_parent() {
        static TAGS: Tags = Tags::new();
        let parent = TAGS.intern(scope(0, "loop", ""));
        let mut ids = Vec::new();
        for i in 0..MOST_TAGS * 2 {
            ids.push(TAGS.intern(scope(parent, &std::format!("step {i}"), "")));
        }
        assert_eq!(*ids.last().unwrap(), parent);
        assert_eq!(TAGS.count(), MOST_TAGS - 1);
        assert!(TAGS.lost() > 0);
    }

    #[test]
    fn components_by_name() {
        assert_eq!(component_of(b"kv_cache"), component::KV_CACHE);
        assert_eq!(component_of(b"weights:encoder/1"), component::WEIGHTS);
        assert_eq!(component_of(b"optimizer/adam"), component::OPTIMIZER);
        assert_eq!(component_of(b"weightsx"), component::UNKNOWN);
        assert_eq!(component_of(b""), component::UNKNOWN);
    }
}
