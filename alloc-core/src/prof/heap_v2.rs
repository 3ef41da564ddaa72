//! jemalloc's text format, which jeprof reads. Readers of it multiply what a site has by what its average
//! size and the period in the header make likely; since weights are known block by block here, the sums
//! are written as they are, with the period 1 that changes nothing.
use super::file::Memory;
use super::live::Figures;
use super::sites::MOST_FRAMES;
use super::{SITES, TOTALS};
use crate::control::text::Line;
use crate::os::file::File;
use crate::os::{Errno, linux};

const LINE_BYTES: usize = 1024;
/// The longest piece that is added to a line at a time.
const PIECE_BYTES: usize = 160;

/// What one site has, over all tags; only memory of the host.
#[derive(Clone, Copy, Default)]
struct Sums([f64; 4]);

impl Sums {
    fn add(&mut self, f: &Figures) {
        let figures = [
            f.weighted_live_blocks,
            f.weighted_live_bytes,
            f.weighted_all_blocks,
            f.weighted_all_bytes,
        ];
        self.0.iter_mut().zip(figures).for_each(|(sum, figure)| *sum += figure);
    }

    fn show(&self, line: &mut Line<LINE_BYTES>) {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and casts saturate"
        )]
        let [live, live_bytes, all, all_bytes] = self.0.map(|sum| (sum + 0.5) as u64);
        line.str("  t*: ").unsigned(live).str(": ").unsigned(live_bytes);
        line.str(" [").unsigned(all).str(": ").unsigned(all_bytes).str("]\n");
    }
}

struct Text<'a> {
    file: &'a File,
    line: Line<LINE_BYTES>,
    result: Result<(), Errno>,
}

impl Text<'_> {
    /// Room for another piece.
    fn line(&mut self) -> &mut Line<LINE_BYTES> {
        if self.line.as_bytes().len() > LINE_BYTES - PIECE_BYTES {
            self.flush();
        }
        &mut self.line
    }

    fn flush(&mut self) {
        if self.result.is_ok() {
            self.result = self.file.write(self.line.as_bytes());
        }
        self.line.clear();
    }
}

pub(super) fn write(file: &File, memory: &mut Memory) -> Result<(), Errno> {
    let mut text = Text { file, line: Line::new(), result: Ok(()) };
    let totals = || (1..TOTALS.end()).filter_map(|id| TOTALS.read(id)).map(|(f, _)| f);
    let host = || totals().filter(|f| f.space == 0 && f.all_blocks > 0);
    let mut sum = Sums::default();
    host().for_each(|f| sum.add(&f));
    sum.show(text.line().str("heap_v2/1\n"));
    // A stack may be there more than once, by tags: readers add up what they find.
    for figures in host() {
        let (len, _) = SITES.read(figures.site, &mut memory.frames).unwrap_or((0, 0));
        text.line().str("@");
        for frame in &memory.frames[..len.min(MOST_FRAMES)] {
            text.line().str(" 0x").hex(*frame);
        }
        let mut sum = Sums::default();
        sum.add(&figures);
        sum.show(text.line().str("\n"));
    }
    text.line().str("\nMAPPED_LIBRARIES:\n");
    text.flush();
    text.result?;
    let maps = linux::open(c"/proc/self/maps")?;
    let copied = copy(maps, file, &mut memory.buffer);
    linux::close(maps);
    copied
}

fn copy(from: i32, to: &File, buffer: &mut [u8]) -> Result<(), Errno> {
    loop {
        match linux::read(from, buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => to.write(&buffer[..len])?,
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
        }
    }
}
