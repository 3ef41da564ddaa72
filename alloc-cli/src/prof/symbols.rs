//! Names for addresses. All addresses of one file are looked up together: a table of symbols is parsed
//! once, and a TensorFlow process has thousands of addresses in a handful of files.
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized, Symbolizer};

use super::profile::Profile;

/// Files with more code info than this are not searched for lines unless asked: it takes minutes.
const MOST_LINES_BYTES: u64 = 64 << 20;

/// One function at an address; several where calls were inlined there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) line: u32,
}

/// What is at an address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    /// Innermost first; at least one.
    pub(crate) functions: Vec<Function>,
    /// The path of the mapped file, or nothing.
    pub(crate) module: String,
    /// Index of the mapping.
    pub(crate) mapping: Option<usize>,
}

/// Names of all addresses of a profile.
#[derive(Debug, Default)]
pub(crate) struct Symbols {
    places: HashMap<u64, Place>,
    unknown: Place,
}

/// A return address is behind the call: a byte before it is in the calling function for certain.
fn call(address: u64) -> u64 {
    address.saturating_sub(1)
}

/// The last part of a path.
pub(crate) fn short(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl Symbols {
    /// Looks up every address of the profile's stacks. `lines`: file and line too, where known.
    pub(crate) fn of(profile: &Profile, lines: bool) -> Self {
        let addresses: BTreeSet<u64> =
            profile.sites.values().flat_map(|site| site.frames.iter().copied()).collect();
        let mut by_mapping: HashMap<Option<usize>, Vec<u64>> = HashMap::new();
        for address in addresses {
            let mapping = profile.mapping_of(call(address)).map(|(index, _)| index);
            by_mapping.entry(mapping).or_default().push(address);
        }
        let mut symbols = Self {
            unknown: Place { functions: vec![Function::default()], ..Place::default() },
            ..Self::default()
        };
        let symbolizer = Symbolizer::builder().enable_code_info(lines).build();
        for (mapping, addresses) in by_mapping {
            symbols.look_up(profile, &symbolizer, mapping, &addresses, lines);
        }
        symbols
    }

    fn look_up(
        &mut self,
        profile: &Profile,
        symbolizer: &Symbolizer,
        index: Option<usize>,
        addresses: &[u64],
        lines: bool,
    ) {
        let Some(mapping) = index.map(|index| &profile.mappings[index]) else {
            addresses.iter().for_each(|&address| self.raw(address, "", None, 0));
            return;
        };
        let offsets: Vec<u64> =
            addresses.iter().map(|&a| call(a) - mapping.start + mapping.offset).collect();
        let found = is_same_file(&mapping.path, &mapping.build_id)
            .then(|| names(symbolizer, &mapping.path, &offsets, lines))
            .flatten();
        let Some(found) = found else {
            for (&address, &offset) in addresses.iter().zip(&offsets) {
                self.raw(address, &mapping.path, index, offset + 1);
            }
            return;
        };
        for ((&address, &offset), symbol) in addresses.iter().zip(&offsets).zip(found) {
            let Symbolized::Sym(symbol) = symbol else {
                self.raw(address, &mapping.path, index, offset + 1);
                continue;
            };
            let module = mapping.path.clone();
            let functions = functions(symbol);
            self.places.insert(address, Place { functions, module, mapping: index });
        }
    }

    /// An address with no name: module and offset stand for it.
    fn raw(&mut self, address: u64, module: &str, mapping: Option<usize>, offset: u64) {
        let name = if module.is_empty() {
            format!("0x{address:x}")
        } else {
            format!("{}+0x{offset:x}", short(module))
        };
        let functions = vec![Function { name, ..Function::default() }];
        let place = Place { functions, module: module.to_owned(), mapping };
        self.places.insert(address, place);
    }

    /// What is at an address of the profile.
    pub(crate) fn at(&self, address: u64) -> &Place {
        self.places.get(&address).unwrap_or(&self.unknown)
    }

    #[cfg(test)]
    pub(crate) fn set(&mut self, address: u64, name: &str, module: &str) {
        let functions = vec![Function { name: name.to_owned(), ..Function::default() }];
        let place = Place { functions, module: module.to_owned(), mapping: None };
        self.places.insert(address, place);
    }
}

/// The file may have been replaced since: a wrong name is worse than none.
fn is_same_file(path: &str, build_id: &[u8]) -> bool {
    if !Path::new(path).is_file() {
        return false;
    }
    build_id.is_empty()
        || blazesym::helper::read_elf_build_id(path)
            .is_ok_and(|found| found.is_none_or(|found| found.as_ref() == build_id))
}

fn names<'a>(
    symbolizer: &'a Symbolizer,
    path: &str,
    offsets: &[u64],
    lines: bool,
) -> Option<Vec<Symbolized<'a>>> {
    let mut elf = Elf::new(path);
    let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
    elf.debug_syms = lines && bytes <= MOST_LINES_BYTES;
    symbolizer.symbolize(&Source::Elf(elf), Input::FileOffset(offsets)).ok()
}

fn functions(symbol: Sym<'_>) -> Vec<Function> {
    let function = |name: &str, code: Option<&CodeInfo<'_>>| Function {
        name: name.to_owned(),
        file: code.map(|code| code.to_path().to_string_lossy().into_owned()).unwrap_or_default(),
        line: code.and_then(|code| code.line).unwrap_or(0),
    };
    // The innermost inlined call comes last; the line of each is where the next one was inlined.
    let mut functions: Vec<Function> = symbol
        .inlined
        .iter()
        .rev()
        .map(|inlined| function(&inlined.name, inlined.code_info.as_ref()))
        .collect();
    functions.push(function(&symbol.name, symbol.code_info.as_deref()));
    functions
}

/// Whether a frame is the allocator's own or only passes a request on: no part of who asked.
pub(crate) fn is_allocator(function: &str, module: &str) -> bool {
    const NAMES: [&str; 24] = [
        "malloc",
        "calloc",
        "realloc",
        "reallocarray",
        "memalign",
        "aligned_alloc",
        "posix_memalign",
        "valloc",
        "pvalloc",
        "mallocx",
        "rallocx",
        "operator new",
        "__rust_alloc",
        "__rust_realloc",
        "__rust_alloc_zeroed",
        "__rdl_",
        "__rustc::__rust",
        "__rustc::__rdl",
        "alloc::alloc::alloc",
        "alloc::alloc::Global",
        "<alloc::alloc::Global",
        "thermalloc",
        "<thermalloc",
        "_ZN10thermalloc",
    ];
    let module = short(module);
    if module.starts_with("libthermalloc") {
        return true;
    }
    NAMES.iter().any(|name| {
        function.strip_prefix(name).is_some_and(|rest| {
            matches!(
                *name,
                "__rdl_"
                    | "__rustc::__rust"
                    | "__rustc::__rdl"
                    | "thermalloc"
                    | "<thermalloc"
                    | "_ZN10thermalloc"
                    | "alloc::alloc::alloc"
            ) || rest.is_empty()
                || rest.starts_with(['(', '[', ' ', '@', ':'])
        })
    })
}

/// A name without what nobody reads: the arguments and the hash of a mangled Rust name.
pub(crate) fn tidy(name: &str) -> &str {
    let name = match name.rfind("::h") {
        Some(at)
            if name.len() == at + 19 && name[at + 3..].bytes().all(|b| b.is_ascii_hexdigit()) =>
        {
            &name[..at]
        }
        _ => name,
    };
    // The last bracket at depth 0 that opens the arguments; `operator()` has one that is none.
    let mut depth = 0usize;
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'<' => depth += 1,
            b'>' if at > 0 && !matches!(name.as_bytes()[at - 1], b'-' | b'=') => {
                depth = depth.saturating_sub(1);
            }
            b'(' if depth == 0 && at > 0 => {
                let rest = &name[at..];
                let keep = name[..at].ends_with("operator") || rest.starts_with("(anonymous");
                if !keep {
                    return without_result(name[..at].trim_end());
                }
            }
            _ => {}
        }
    }
    name
}

/// A function template's name begins with the type of its result.
fn without_result(name: &str) -> &str {
    let mut depth = 0usize;
    let mut start = 0;
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'<' | b'(' => depth += 1,
            b'>' | b')' => depth = depth.saturating_sub(1),
            b' ' if depth == 0 && !name[..at].ends_with("operator") => start = at + 1,
            _ => {}
        }
    }
    // Operators are called what they are: `operator<`, `operator new`, `operator unsigned long`.
    if name.contains("operator") { name } else { &name[start..] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_the_allocator() {
        for ours in ["malloc", "operator new(unsigned long)", "operator new[]", "__rust_alloc"] {
            assert!(is_allocator(ours, "/bin/a"), "{ours}");
        }
        assert!(is_allocator("anything", "/usr/lib/libthermalloc.so.0"));
        for theirs in ["mallocator", "PyMem_Malloc", "operator newt", "main", "malloc_hook_user"] {
            assert!(!is_allocator(theirs, "/bin/a"), "{theirs}");
        }
    }

    #[test]
    fn names_lose_arguments_and_hashes() {
        for (name, tidied) in [
            ("a::b::h0123456789abcdef", "a::b"),
            ("f(int, char)", "f"),
            ("A<f(int)>::g(int) const", "A<f(int)>::g"),
            ("(anonymous namespace)::f(int)", "(anonymous namespace)::f"),
            ("a::(anonymous namespace)::f(int)", "a::(anonymous namespace)::f"),
            ("A::operator()(int) const", "A::operator()"),
            ("main", "main"),
            ("void* Eigen::A<int, (B)1>::f<C>(int)", "Eigen::A<int, (B)1>::f<C>"),
            ("absl::Status (anonymous namespace)::g<int>(int)", "(anonymous namespace)::g<int>"),
            ("std::vec<i32>::operator->", "std::vec<i32>::operator->"),
        ] {
            assert_eq!(tidy(name), tidied);
        }
    }
}
