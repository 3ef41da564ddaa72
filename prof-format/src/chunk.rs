//! Chunks: the unit of writing, of checking and of loss. A file that was cut off, or of which a part
//! was never written, loses the chunks concerned and no other.
use crate::record::Record;
use crate::wire;

/// What a chunk begins with; the last character is the version of the format.
pub const MAGIC: [u8; 8] = *b"THPROF\0\x01";
/// Bytes of a chunk before its payload: magic, payload length, checksum, sequence number.
pub const CHUNK_HEADER_BYTES: usize = 24;
/// The longest payload that a reader accepts.
pub const MOST_PAYLOAD_BYTES: usize = 16 << 20;

/// CRC-32C by byte.
static CRC: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        #[allow(clippy::cast_possible_truncation, reason = "below 256")]
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

/// The checksum of `bytes`: CRC-32C, as iSCSI and ext4 have it.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        let [low, ..] = crc.to_le_bytes();
        crc >> 8 ^ CRC[usize::from(low ^ byte)]
    })
}

/// Gathers records into one chunk, in memory of the caller's.
#[derive(Debug)]
pub struct ChunkWriter<'a> {
    buffer: &'a mut [u8],
    len: usize,
    sequence: u64,
}

impl<'a> ChunkWriter<'a> {
    /// An empty chunk in `buffer`, the file's `sequence`th, from 0.
    #[must_use]
    pub fn new(buffer: &'a mut [u8], sequence: u64) -> Self {
        Self { buffer, len: CHUNK_HEADER_BYTES, sequence }
    }

    /// Adds a record; `false`, and nothing added, where there is no room for it.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        let Some(room) = self.buffer.get_mut(self.len..) else { return false };
        match record.encode(room) {
            Some(bytes) => {
                self.len += bytes;
                true
            }
            None => false,
        }
    }

    /// Whether no record is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len <= CHUNK_HEADER_BYTES
    }

    /// Completes the header; the bytes to write, or nothing where the chunk is empty. The next chunk
    /// starts with the next sequence number.
    pub fn finish(&mut self) -> Option<&[u8]> {
        if self.is_empty() {
            return None;
        }
        let (header, payload) =
            self.buffer.get_mut(..self.len)?.split_at_mut_checked(CHUNK_HEADER_BYTES)?;
        let len = u32::try_from(payload.len()).ok()?;
        let fields: [&[u8]; 4] = [
            &MAGIC,
            &len.to_le_bytes(),
            &checksum(payload).to_le_bytes(),
            &self.sequence.to_le_bytes(),
        ];
        let mut rest = header;
        for field in fields {
            let (here, after) = rest.split_at_mut_checked(field.len())?;
            here.copy_from_slice(field);
            rest = after;
        }
        let len = core::mem::replace(&mut self.len, CHUNK_HEADER_BYTES);
        self.sequence += 1;
        self.buffer.get(..len)
    }

    /// The number that the chunk has, or the next one after [`Self::finish`].
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// What a reader had to leave out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Bytes that belong to no whole chunk.
    pub skipped_bytes: u64,
    /// Chunks that are not there, by their numbers.
    pub missing_chunks: u64,
    /// The file ends within a chunk.
    pub truncated: bool,
    /// Records that can't be read within chunks that can.
    pub bad_records: u64,
}

impl Damage {
    /// Whether anything is missing.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// The whole chunks of a file: their payloads. What lies between them is skipped.
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    rest: &'a [u8],
    next: u64,
    damage: Damage,
}

impl<'a> Chunks<'a> {
    /// The chunks of `file`.
    #[must_use]
    pub fn new(file: &'a [u8]) -> Self {
        Self { rest: file, next: 0, damage: Damage::default() }
    }

    /// What was left out so far.
    #[must_use]
    pub fn damage(&self) -> Damage {
        self.damage
    }

    /// The chunk at the start of the rest: its number and payload.
    fn first(&mut self) -> Option<(u64, &'a [u8])> {
        let after = self.rest.strip_prefix(&MAGIC)?;
        let (header, after) = after.split_at_checked(CHUNK_HEADER_BYTES - MAGIC.len())?;
        let word = |at: usize| {
            let bytes = header.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let (len, sum) = (word(0)? as usize, word(4)?);
        let sequence = u64::from(word(8)?) | u64::from(word(12)?) << 32;
        if len > MOST_PAYLOAD_BYTES {
            return None;
        }
        let Some((payload, rest)) = after.split_at_checked(len) else {
            self.damage.truncated = true;
            return None;
        };
        if checksum(payload) != sum {
            return None;
        }
        self.rest = rest;
        Some((sequence, payload))
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while !self.rest.is_empty() {
            if let Some((sequence, payload)) = self.first() {
                // What comes after the cut of one chunk shows that the file goes on.
                self.damage.truncated = false;
                self.damage.missing_chunks += sequence.saturating_sub(self.next);
                self.next = sequence.saturating_add(1);
                return Some(payload);
            }
            if self.rest.starts_with(&MAGIC) || MAGIC.starts_with(self.rest) {
                self.damage.truncated |= self.rest.len() < CHUNK_HEADER_BYTES;
            }
            let away = self.rest.get(1..).and_then(|rest| rest.windows(8).position(|w| w == MAGIC));
            let skip = away.map_or(self.rest.len(), |at| at + 1);
            self.damage.skipped_bytes += skip as u64;
            self.rest = self.rest.get(skip..).unwrap_or(&[]);
        }
        None
    }
}

/// Every record of a file that can be read, in the order in which they were written.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    chunks: Chunks<'a>,
    payload: &'a [u8],
    bad: u64,
}

impl<'a> Records<'a> {
    /// The records of `file`.
    #[must_use]
    pub fn new(file: &'a [u8]) -> Self {
        Self { chunks: Chunks::new(file), payload: &[], bad: 0 }
    }

    /// What was left out so far.
    #[must_use]
    pub fn damage(&self) -> Damage {
        Damage { bad_records: self.bad, ..self.chunks.damage() }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        loop {
            if self.payload.is_empty() {
                self.payload = self.chunks.next()?;
                continue;
            }
            match wire::split(self.payload) {
                Some((raw, rest)) => {
                    self.payload = rest;
                    return Some(Record::decode(raw));
                }
                None => {
                    self.bad += 1;
                    self.payload = &[];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Step;

    fn step(n: u64) -> Record<'static> {
        Record::Step(Step { time_ns: n * 10, step: n, thread: 1, flags: 0 })
    }

    /// A file of `chunks` chunks with three steps each.
    fn file(chunks: u64) -> Vec<u8> {
        let (mut buffer, mut file) = ([0; 512], Vec::new());
        let mut writer = ChunkWriter::new(&mut buffer, 0);
        for chunk in 0..chunks {
            for i in 0..3 {
                assert!(writer.push(&step(chunk * 3 + i)));
            }
            file.extend_from_slice(writer.finish().unwrap());
        }
        file
    }

    fn steps(bytes: &[u8]) -> (Vec<u64>, Damage) {
        let mut records = Records::new(bytes);
        let steps = records
            .by_ref()
            .map(|record| match record {
                Record::Step(step) => step.step,
                other => panic!("{other:?}"),
            })
            .collect();
        (steps, records.damage())
    }

    #[test]
    fn the_checksum_is_the_published_one() {
        assert_eq!(checksum(b"123456789"), 0xE306_9283);
        assert_eq!(checksum(b""), 0);
    }

    #[test]
    fn a_whole_file_has_no_damage() {
        assert_eq!(steps(&file(4)), ((0..12).collect(), Damage::default()));
        assert_eq!(steps(b""), (vec![], Damage::default()));
    }

    #[test]
    fn a_file_cut_anywhere_keeps_its_whole_chunks() {
        let file = file(3);
        let chunk = file.len() / 3;
        for len in 0..file.len() {
            let (found, damage) = steps(&file[..len]);
            let whole = len / chunk;
            assert_eq!(found, (0..whole as u64 * 3).collect::<Vec<_>>(), "{len}");
            assert_eq!(damage.skipped_bytes, (len % chunk) as u64);
            assert_eq!(damage.truncated, len % chunk != 0, "{len}: {damage:?}");
            assert_eq!(damage.missing_chunks, 0);
        }
    }

    #[test]
    fn a_changed_byte_costs_one_chunk() {
        let file = file(3);
        let chunk = file.len() / 3;
        for at in chunk..2 * chunk {
            let mut bad = file.clone();
            bad[at] ^= 0x40;
            let (found, damage) = steps(&bad);
            let number = chunk + 16..chunk + 24;
            if number.contains(&at) {
                // The number is not covered by the sum: the records are right all the same.
                assert_eq!(found.len(), 9);
                continue;
            }
            assert_eq!(found, [0, 1, 2, 6, 7, 8], "{at}");
            assert_eq!(damage.skipped_bytes, chunk as u64, "{at}");
            assert_eq!((damage.missing_chunks, damage.truncated), (1, false), "{at}: {damage:?}");
        }
    }

    #[test]
    fn a_chunk_that_is_full_takes_no_more() {
        let mut buffer = [0; 100];
        let mut writer = ChunkWriter::new(&mut buffer, 5);
        assert!(writer.finish().is_none());
        let mut pushed = 0;
        while writer.push(&step(pushed)) {
            pushed += 1;
        }
        assert_eq!(pushed, 2);
        let bytes = writer.finish().unwrap().to_vec();
        let (found, damage) = steps(&bytes[..]);
        assert_eq!((found.len(), damage.missing_chunks), (2, 5));
        assert_eq!(writer.sequence(), 6);
        assert!(ChunkWriter::new(&mut [0; 10], 0).finish().is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>, at in 0usize..200, cut in 0usize..400) {
            let _ = Records::new(&bytes).count();
            let mut mixed = file(2);
            let at = at.min(mixed.len());
            mixed.splice(at..at, bytes);
            mixed.truncate(cut);
            let _ = Records::new(&mixed).count();
        }
    }
}
