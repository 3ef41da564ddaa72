//! Tables for terminals, and figures as people read them.
use std::fmt::Write as _;

use super::profile::float;

/// Bytes with a unit, three digits or so.
pub(crate) fn bytes(number: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    // Nothing has no sign.
    let (mut number, mut unit) = (if number.abs() < 0.5 { 0.0 } else { number }, 0);
    while number.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        number /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || number.abs() >= 100.0 { 0 } else { 1 };
    format!("{number:.digits$} {}", UNITS[unit])
}

/// As [`bytes`], of a whole number.
pub(crate) fn size(number: u64) -> String {
    bytes(float(number))
}

/// A share of a whole in per cent.
pub(crate) fn percent(part: f64, of: f64) -> String {
    // Not "-0.0 %".
    let share = if part.abs() * 2000.0 < of.abs() { 0.0 } else { part / of };
    if of == 0.0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * share) }
}

/// A count with a unit, three digits or so.
pub(crate) fn count(number: f64) -> String {
    const UNITS: [&str; 4] = ["", " k", " M", " G"];
    let (mut number, mut unit) = (number, 0);
    while number.abs() >= 10_000.0 && unit + 1 < UNITS.len() {
        number /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && number.abs() < 100.0);
    format!("{number:.digits$}{}", UNITS[unit])
}

/// A span of time.
pub(crate) fn span(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Rows of cells. All columns but the last are as wide as their widest cell; those that are named with a
/// leading `>` are set to the right.
#[derive(Debug)]
pub(crate) struct Table {
    head: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self {
            head: head.iter().map(|name| name.trim_start_matches('>').to_owned()).collect(),
            right: head.iter().map(|name| name.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    pub(crate) fn text(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.chain(self.head.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut text = String::new();
        for row in std::iter::once(&self.head).chain(&self.rows) {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths.get(column).copied().unwrap_or(0);
                let gap = if column == 0 { "" } else { "  " };
                let _ = if self.right.get(column).copied().unwrap_or(false) {
                    write!(line, "{gap}{cell:>width$}")
                } else {
                    write!(line, "{gap}{cell:<width$}")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_for_people() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(512 << 20), "512 MiB");
        assert_eq!(bytes(-2048.0), "-2.0 KiB");
        assert_eq!((bytes(-0.0), bytes(-0.4)), ("0 B".to_owned(), "0 B".to_owned()));
        assert_eq!(count(123_456.0), "123 k");
        assert_eq!(count(12.0), "12");
        assert_eq!(span(0.000_25), "250 us");
        assert_eq!(span(90.0), "90.0 s");
        assert_eq!(percent(1.0, 0.0), "-");
        assert_eq!(
            (percent(-1.0, 1e5), percent(-1.0, 10.0)),
            ("0.0 %".to_owned(), "-10.0 %".to_owned())
        );
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", ">bytes", "where"]);
        table.row(["a", "1", "x"]);
        table.row(["long", "1000", "y"]);
        assert_eq!(table.text(), "name  bytes  where\na         1  x\nlong   1000  y\n");
    }
}
