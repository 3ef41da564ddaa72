//! Any text as an option's name and value: what is accepted is what a reading of the manual accepts,
//! and what is refused changes nothing. Every report can be written whatever is set.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use thermalloc::control::host::HOST;
use thermalloc::control::options::{self, Kind, Mutability, Row, SetError};
use thermalloc::control::report::{self, Format};

#[derive(Arbitrary, Debug)]
enum Value<'a> {
    Text(&'a str),
    Number(i64, Option<char>),
    Word(bool),
    Default,
}

#[derive(Arbitrary, Debug)]
struct Setting<'a> {
    /// A row, or past the last one the text.
    row: u8,
    name: &'a str,
    value: Value<'a>,
}

/// An independent reading of `docs/options.md`.
fn reading(row: &Row, text: &str) -> Option<i64> {
    if text == "default" {
        return Some(row.default);
    }
    let plain = |text: &str| text.parse::<i128>().ok().filter(|_| !text.starts_with('+'));
    let value = match row.kind {
        Kind::Bool => match text {
            "true" => 1,
            "false" => 0,
            _ => return None,
        },
        Kind::Bytes => {
            let unit = match text.chars().last()?.to_ascii_lowercase() {
                'k' => 10,
                'm' => 20,
                'g' => 30,
                _ => 0,
            };
            let digits = if unit == 0 { text } else { &text[..text.len() - 1] };
            plain(digits)?.checked_mul(1 << unit)?
        }
        _ => plain(text)?,
    };
    i64::try_from(value).ok().filter(|value| (row.min..=row.max).contains(value))
}

fn all() -> Vec<i64> {
    options::ROWS.iter().map(Row::get).collect()
}

fn apply(setting: &Setting<'_>) {
    let name = options::ROWS
        .get(usize::from(setting.row) % (options::ROWS.len() + 1))
        .map_or(setting.name, |known| known.name);
    let text = match setting.value {
        Value::Text(text) => text.to_owned(),
        Value::Number(number, unit) => {
            number.to_string() + &unit.map(String::from).unwrap_or_default()
        }
        Value::Word(word) => word.to_string(),
        Value::Default => "default".to_owned(),
    };
    let before = all();
    let expected = match options::find(name) {
        None => Err(SetError::Unknown),
        Some(row) if row.mutability == Mutability::Start => Err(SetError::StartOnly),
        Some(row) => reading(row, &text).map(|value| (row, value)).ok_or(SetError::Invalid),
    };
    let result = if setting.row & 128 == 0 {
        options::set(name, &text)
    } else {
        HOST.set_option(name, &text)
    };
    assert_eq!(result, expected.as_ref().map(|_| ()).map_err(|&error| error), "{name}:{text}");
    match expected {
        Err(_) => assert_eq!(all(), before, "{name}:{text}"),
        Ok((row, value)) => {
            let hidden = name == "hot_window_ms" && options::dirty_decay_ms() == 0;
            assert_eq!(row.get(), if hidden { 0 } else { value }, "{name}:{text}");
            let mut shown = [0; 32];
            let shown = HOST.option(name, &mut shown).expect("32 bytes are enough");
            assert_eq!(reading(row, shown), Some(row.get()), "{name} shows as {shown}");
        }
    }
}

fn reports() {
    for format in [Format::Text, Format::Json, Format::MallocInfo, Format::Prometheus] {
        let mut written = Vec::new();
        report::write(format, &mut |bytes| written.extend_from_slice(bytes));
        let text = String::from_utf8(written).expect("a report is text");
        assert!(text.ends_with('\n') && !text.contains('\0'), "{text}");
    }
}

fuzz_target!(|settings: Vec<Setting<'_>>| {
    settings.iter().for_each(apply);
    reports();
});
