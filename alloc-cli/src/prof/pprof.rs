//! pprof's `profile.proto`, gzipped, with names in it: `go tool pprof`, speedscope and Perfetto read it.
//! Values are for what samples stand for. Labels are the component and the operator or scope.
use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::analysis::{Analysis, Instance, name_of};
use super::profile::{float, whole};

/// Writes fields of a message.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        loop {
            let [low, ..] = value.to_le_bytes();
            value >>= 7;
            if value == 0 {
                self.0.push(low & 0x7f);
                return;
            }
            self.0.push(low | 0x80);
        }
    }

    /// Protocol buffers leave out what is 0.
    fn number(&mut self, field: u64, value: u64) {
        if value != 0 {
            self.varint(field << 3);
            self.varint(value);
        }
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u64, build: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        build(&mut inner);
        self.bytes(field, &inner.0);
    }

    fn packed(&mut self, field: u64, values: impl IntoIterator<Item = u64>) {
        let mut inner = Message::default();
        values.into_iter().for_each(|value| inner.varint(value));
        self.bytes(field, &inner.0);
    }
}

#[derive(Debug, Default)]
struct Strings {
    numbers: HashMap<String, u64>,
    all: Vec<String>,
}

impl Strings {
    fn number(&mut self, text: &str) -> u64 {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        let number = self.all.len() as u64;
        self.all.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        number
    }
}

/// One line of the profile: a stack with labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    site: u32,
    tag: u32,
    component: u8,
}

/// The profile of a moment.
pub(crate) fn write(a: &Analysis, instant: &Instance) -> Vec<u8> {
    let mut samples: BTreeMap<Key, [f64; 4]> = BTreeMap::new();
    for totals in a.profile.snapshots.last().map_or(&[][..], |last| &last.totals) {
        let component = a.components.of_pair(totals.site, totals.tag);
        let key = Key { site: totals.site, tag: totals.tag, component };
        let values = samples.entry(key).or_default();
        values[0] += totals.weighted_all_blocks;
        values[1] += totals.weighted_all_bytes;
    }
    for block in &instant.live {
        let component = a.component(block, instant.now).0;
        let values =
            samples.entry(Key { site: block.site, tag: block.tag, component }).or_default();
        values[2] += block.weight;
        values[3] += block.weight * float(block.size);
    }
    Builder {
        a,
        profile: Message::default(),
        strings: Strings::default(),
        functions: HashMap::new(),
        locations: HashMap::new(),
    }
    .build(instant, &samples)
}

struct Builder<'a> {
    a: &'a Analysis,
    profile: Message,
    strings: Strings,
    /// By name and file.
    functions: HashMap<(u64, u64), u64>,
    /// By address.
    locations: HashMap<u64, u64>,
}

impl Builder<'_> {
    fn build(mut self, instant: &Instance, samples: &BTreeMap<Key, [f64; 4]>) -> Vec<u8> {
        self.strings.number("");
        for (kind, unit) in [
            ("alloc_objects", "count"),
            ("alloc_space", "bytes"),
            ("inuse_objects", "count"),
            ("inuse_space", "bytes"),
        ] {
            self.value_type(1, kind, unit);
        }
        self.mappings();
        for (key, values) in samples {
            self.sample(*key, values);
        }
        let p = &self.a.profile;
        let since = instant.now.time_ns.saturating_sub(p.time_ns);
        self.profile.number(9, p.unix_ns + since);
        self.profile.number(10, since);
        self.value_type(11, "space", "bytes");
        self.profile.number(12, p.period_bytes.max(1));
        let comment = self.strings.number(&format!("thermalloc {}, {}", p.version, instant.what));
        self.profile.number(13, comment);
        let default = self.strings.number("inuse_space");
        self.profile.number(14, default);
        for text in std::mem::take(&mut self.strings.all) {
            self.profile.bytes(6, text.as_bytes());
        }
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        // Writing to memory can't fail.
        let _ = gzip.write_all(&self.profile.0);
        gzip.finish().unwrap_or_default()
    }

    fn value_type(&mut self, field: u64, kind: &str, unit: &str) {
        let (kind, unit) = (self.strings.number(kind), self.strings.number(unit));
        self.profile.message(field, |m| {
            m.number(1, kind);
            m.number(2, unit);
        });
    }

    /// Mapping i has the id i + 1; the first one has to be the program's.
    fn order(&self) -> Vec<usize> {
        let p = &self.a.profile;
        let mut order: Vec<usize> = (0..p.mappings.len()).collect();
        order.sort_by_key(|&i| (p.mappings[i].path != p.program, p.mappings[i].start));
        order
    }

    fn mappings(&mut self) {
        for (rank, index) in self.order().into_iter().enumerate() {
            let m = &self.a.profile.mappings[index];
            let file = self.strings.number(&m.path);
            let id: String = m.build_id.iter().map(|byte| format!("{byte:02x}")).collect();
            let id = self.strings.number(&id);
            self.profile.message(3, |out| {
                out.number(1, rank as u64 + 1);
                out.number(2, m.start);
                out.number(3, m.end);
                out.number(4, m.offset);
                out.number(5, file);
                out.number(6, id);
                // Names are in it already.
                out.number(7, 1);
                out.number(8, 1);
                out.number(10, 1);
            });
        }
    }

    fn sample(&mut self, key: Key, values: &[f64; 4]) {
        let a = self.a;
        let places = a.places(key.site);
        let locations: Vec<u64> =
            places.iter().map(|(address, _)| self.location(*address)).collect();
        let labels: Vec<(u64, u64)> = [
            ("component", name_of(key.component).to_owned()),
            ("what", if key.tag == 0 { String::new() } else { a.tag(key.tag) }),
        ]
        .into_iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(name, text)| (self.strings.number(name), self.strings.number(&text)))
        .collect();
        self.profile.message(2, |m| {
            m.packed(1, locations);
            m.packed(2, values.map(whole));
            for (name, text) in labels {
                m.message(3, |label| {
                    label.number(1, name);
                    label.number(2, text);
                });
            }
        });
    }

    fn location(&mut self, address: u64) -> u64 {
        if let Some(&id) = self.locations.get(&address) {
            return id;
        }
        let id = self.locations.len() as u64 + 1;
        self.locations.insert(address, id);
        let place = self.a.symbols.at(address);
        let order = self.order();
        let mapping = place.mapping.and_then(|index| order.iter().position(|&i| i == index));
        let lines: Vec<(u64, u64)> = place
            .functions
            .iter()
            .map(|f| (self.function(&f.name, &f.file), u64::from(f.line)))
            .collect();
        self.profile.message(4, |m| {
            m.number(1, id);
            m.number(2, mapping.map_or(0, |rank| rank as u64 + 1));
            m.number(3, address);
            for (function, line) in lines {
                m.message(4, |out| {
                    out.number(1, function);
                    out.number(2, line);
                });
            }
        });
        id
    }

    fn function(&mut self, name: &str, file: &str) -> u64 {
        let key = (self.strings.number(name), self.strings.number(file));
        if let Some(&id) = self.functions.get(&key) {
            return id;
        }
        let id = self.functions.len() as u64 + 1;
        self.functions.insert(key, id);
        self.profile.message(5, |m| {
            m.number(1, id);
            m.number(2, key.0);
            m.number(3, key.0);
            m.number(4, key.1);
        });
        id
    }
}
