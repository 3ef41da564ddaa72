//! Writes what a program asks of the pool to a file, from which the bench replays it.
//!
//! One event a line: `a BLOCK BYTES STREAM` an allocation, `f BLOCK` its free, `u BLOCK STREAM` a use on
//! another stream, `e BLOCK STREAM` the end of one; blocks and streams are numbered as they come.
//!
//! Invariant: the events of a block are in their order; the first error of the file ends the record.

use crate::gpu::lock;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::Mutex;

/// The first line.
const HEADER: &str = "thermalloc-cuda-trace 1";

struct Out {
    file: Option<BufWriter<File>>,
    /// The numbers of blocks in use, by address.
    blocks: HashMap<u64, u64>,
    next: u64,
}

impl Out {
    fn write(&mut self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        if let Some(file) = &mut self.file
            && write(file).is_err()
        {
            self.file = None;
        }
    }
}

/// A record in progress.
pub(crate) struct Recorder(Mutex<Out>);

impl Recorder {
    pub(crate) fn new(file: File) -> Self {
        let file = Some(BufWriter::new(file));
        let mut out = Out { file, blocks: HashMap::new(), next: 0 };
        out.write(|file| writeln!(file, "{HEADER}"));
        Self(Mutex::new(out))
    }

    pub(crate) fn alloc(&self, addr: u64, bytes: u64, stream: u32) {
        let mut out = lock(&self.0);
        let block = out.next;
        out.next += 1;
        out.blocks.insert(addr, block);
        out.write(|file| writeln!(file, "a {block} {bytes} {stream}"));
    }

    pub(crate) fn free(&self, addr: u64) {
        let mut out = lock(&self.0);
        if let Some(block) = out.blocks.remove(&addr) {
            out.write(|file| writeln!(file, "f {block}"));
        }
    }

    /// A use on another stream begins, or ends.
    pub(crate) fn used(&self, addr: u64, stream: u32, is_over: bool) {
        let mut out = lock(&self.0);
        if let Some(&block) = out.blocks.get(&addr) {
            let event = if is_over { 'e' } else { 'u' };
            out.write(|file| writeln!(file, "{event} {block} {stream}"));
        }
    }

    /// Writes out what is buffered.
    pub(crate) fn flush(&self) {
        lock(&self.0).write(Write::flush);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    #[test]
    fn events_are_written_in_order_and_blocks_numbered() {
        let mut file = tempfile();
        let recorder = Recorder::new(file.try_clone().unwrap());
        recorder.alloc(0x1000, 512, 0);
        recorder.alloc(0x2000, 4096, 1);
        recorder.used(0x1000, 1, false);
        recorder.used(0x1000, 1, true);
        recorder.free(0x1000);
        recorder.alloc(0x1000, 1024, 0);
        recorder.free(0x3000);
        recorder.flush();
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines = [HEADER, "a 0 512 0", "a 1 4096 1", "u 0 1", "e 0 1", "f 0", "a 2 1024 0"];
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn a_full_disk_ends_the_record_and_nothing_else() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let recorder = Recorder::new(full);
        for i in 0..10_000 {
            recorder.alloc(i, 512, 0);
        }
        recorder.flush();
        assert!(lock(&recorder.0).file.is_none());
    }

    /// A file without a name.
    fn tempfile() -> File {
        let path = std::env::temp_dir().join(format!("thermalloc-record-{}", std::process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }
}
