//! Any text as `MALLOC_CONF` and `THERMALLOC_CONF`: nothing ends the process, and what is reported is whole lines
//! that a terminal can show. What is set is what is allowed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use thermalloc::control::{options, try_conf};

fuzz_target!(|texts: (&[u8], &[u8])| {
    let (shared, own) = texts;
    let mut lines = Vec::new();
    let mut values = Vec::new();
    try_conf(shared, own, &mut |line| lines.push(line.to_vec()), &mut |value| values.push(value));
    for line in lines {
        let (end, line) = line.split_last().expect("a line");
        assert_eq!(*end, b'\n');
        assert!(line.starts_with(b"thermalloc: "));
        assert!(line.iter().all(|byte| (b' '..=b'~').contains(byte)));
    }
    assert_eq!(values.len(), options::ROWS.len());
    for (row, value) in options::ROWS.iter().zip(values) {
        assert!((row.min..=row.max).contains(&value), "{} is {value}", row.name);
    }
});
