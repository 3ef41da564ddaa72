//! Control and reports within a process: nothing of it allocates, and the figures add up. One test: a
//! second one's thread would allocate beside it.

use thermalloc::Thermalloc;
use thermalloc::control::report::{self, Format};
use thermalloc::control::{stats_print, thread_allocated};
use thermalloc::ctl::{self, Mib, arenas, epoch, opt, stats};

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

/// Figures are those of a moment; each report is written whole.
fn use_everything() -> usize {
    epoch::advance().expect("the epoch");
    let [allocated, active, mapped, resident] = [
        stats::allocated::read().expect("a figure"),
        stats::active::read().expect("a figure"),
        stats::mapped::read().expect("a figure"),
        stats::resident::read().expect("a figure"),
    ];
    assert!(allocated > 0 && allocated <= active && active <= mapped && active <= resident);
    let arena = Mib::<usize>::of("stats.arenas.0.pactive").expect("a name");
    let count = arenas::narenas::read().expect("a number") as usize;
    let pages: usize = (0..count).map(|i| arena.at(2, i).read().expect("a figure")).sum();
    assert_eq!(pages * arenas::page::read().expect("a number"), active);
    let measured = stats::resident_measured::read().expect("a figure");
    assert!(measured > 0 && measured <= resident as u64, "{measured} of {resident}");
    assert_eq!(opt::thp::read(), Ok("default"));
    assert_eq!(Mib::<u32>::of("no.such.name").unwrap_err(), ctl::Error::NoEntry);

    let mut bytes = 0;
    for letters in ["", "J", "a", "Jgmdablxeh"] {
        stats_print::write(letters.as_bytes(), &mut |piece| bytes += piece.count_bytes());
    }
    for format in [Format::Text, Format::Json, Format::MallocInfo, Format::Prometheus] {
        report::write(format, &mut |line| bytes += line.len());
    }
    bytes
}

#[test]
fn nothing_allocates() {
    let kept: Vec<Vec<u8>> = (1..3000).map(|i| vec![1; i * 31]).collect();
    let before = thread_allocated();
    let bytes = use_everything();
    assert_eq!(thread_allocated(), before, "something was allocated");
    assert!(bytes > 100_000, "{bytes}");
    assert_eq!(kept.len(), 2999);
}
