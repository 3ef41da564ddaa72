//! Memory pressure: how close the process is to a limit of its own, how close its cgroup is to its
//! limit, and whether tasks in the cgroup wait for memory (PSI). Read by open, read and close from
//! the background thread, about once a second while there is something to give.
//!
//! Files: cgroup v2's `memory.current`, `memory.high`, `memory.max` and `memory.pressure`, v1's
//! `memory.usage_in_bytes` and `memory.limit_in_bytes`; formats in the kernel's
//! `admin-guide/cgroup-v2.rst` and `accounting/psi.rst`. What can't be read doesn't press.
use core::ffi::CStr;

use crate::os::Os;

/// How much is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    /// Nothing beyond what is cold and due.
    None,
    /// What lies above the demand window's peak, at once.
    Cold,
    /// Everything that is free, what is warm too.
    Warm,
}

/// The limits that the options set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Resident bytes of our own; 0: none.
    pub(crate) own_bytes: u64,
    /// Per cent of the cgroup's limit; 0: the cgroup isn't looked at.
    pub(crate) group_percent: u64,
}

/// Tasks that waited for memory, hundredths of a per cent of the last ten seconds, from which on
/// cold pages, and all free pages, are given up.
const SOME_STALLED: u64 = 20_00;
const ALL_STALLED: u64 = 10_00;

/// The pressure now, with `resident_bytes` of our own resident.
pub(crate) fn look(os: &impl Os, limits: Limits, resident_bytes: u64) -> Pressure {
    let own = match limits.own_bytes {
        0 => Pressure::None,
        limit => against(resident_bytes, limit),
    };
    if limits.group_percent == 0 || own == Pressure::Warm {
        return own;
    }
    own.max(group(os, limits.group_percent).unwrap_or(Pressure::None))
}

/// Within a sixteenth of the limit what is cold goes, from the limit on all that is free.
fn against(used: u64, limit: u64) -> Pressure {
    if used >= limit {
        Pressure::Warm
    } else if used >= limit - limit / 16 {
        Pressure::Cold
    } else {
        Pressure::None
    }
}

fn group(os: &impl Os, percent: u64) -> Option<Pressure> {
    let mut buffer = [0; 1024];
    let len = os.read_file(c"/proc/self/cgroup", &mut buffer).ok()?;
    let group = Group::find(&buffer[..len])?;
    let (used, limits) = if group.v2 {
        (group.number(os, b"memory.current"), [b"memory.high".as_slice(), b"memory.max"])
    } else {
        let limit = b"memory.limit_in_bytes".as_slice();
        (group.number(os, b"memory.usage_in_bytes"), [limit, limit])
    };
    let used = used?;
    let limit = limits.iter().filter_map(|name| group.number(os, name)).min();
    // A limit of none is a number larger than any memory in v1, and a word in v2.
    let near = limit.map_or(Pressure::None, |limit| {
        against(used, limit / 100 * percent + limit % 100 * percent / 100)
    });
    Some(near.max(if group.v2 { group.stalled(os) } else { Pressure::None }))
}

/// The process's memory cgroup.
struct Group<'a> {
    path: &'a [u8],
    v2: bool,
}

impl<'a> Group<'a> {
    /// From the lines of `/proc/self/cgroup`: `0::PATH` for v2, `N:memory:PATH` for v1, which counts
    /// where both are there.
    fn find(lines: &'a [u8]) -> Option<Self> {
        let mut found = None;
        for line in lines.split(|&b| b == b'\n') {
            let mut fields = line.splitn(3, |&b| b == b':');
            let (Some(_), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if controllers.split(|&b| b == b',').any(|name| name == b"memory") {
                return Some(Self { path, v2: false });
            }
            if controllers.is_empty() {
                found = Some(Self { path, v2: true });
            }
        }
        found
    }

    /// The contents of a file of the group: where the group is mounted as a root of its own, as in a
    /// container, its path doesn't exist and the root is it.
    fn read(&self, os: &impl Os, name: &[u8], buffer: &mut [u8]) -> Option<usize> {
        let mount: &[u8] = if self.v2 { b"/sys/fs/cgroup" } else { b"/sys/fs/cgroup/memory" };
        [self.path, b"".as_slice()].iter().find_map(|path| {
            let mut text = [0; 512];
            let path = join(&mut text, &[mount, path, b"/", name, b"\0"])?;
            os.read_file(path, buffer).ok()
        })
    }

    fn number(&self, os: &impl Os, name: &[u8]) -> Option<u64> {
        let mut buffer = [0; 32];
        let len = self.read(os, name, &mut buffer)?;
        decimal(buffer[..len].trim_ascii())
    }

    fn stalled(&self, os: &impl Os) -> Pressure {
        let mut buffer = [0; 256];
        let Some(len) = self.read(os, b"memory.pressure", &mut buffer) else {
            return Pressure::None;
        };
        if average(&buffer[..len], b"full ") >= ALL_STALLED {
            Pressure::Warm
        } else if average(&buffer[..len], b"some ") >= SOME_STALLED {
            Pressure::Cold
        } else {
            Pressure::None
        }
    }
}

/// `parts` one after the other, the last of which ends in the only NUL.
fn join<'a>(text: &'a mut [u8; 512], parts: &[&[u8]]) -> Option<&'a CStr> {
    let mut len = 0;
    for part in parts {
        text.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_with_nul(&text[..len]).ok()
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |n, &b| {
        n.checked_mul(10)?.checked_add(u64::from(char::from(b).to_digit(10)?))
    })
}

/// `avg10` of the line that starts with `kind`, in hundredths of a per cent.
fn average(text: &[u8], kind: &[u8]) -> u64 {
    let line = text.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(kind));
    let field = line.and_then(|line| line.strip_prefix(b"avg10="));
    let Some(value) = field.and_then(|field| field.split(|&b| b == b' ').next()) else { return 0 };
    let mut parts = value.splitn(2, |&b| b == b'.');
    let whole = parts.next().and_then(decimal).unwrap_or(0);
    let hundredths = parts.next().and_then(decimal).unwrap_or(0);
    whole * 100 + hundredths.min(99)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::fake::FakeKernel;

    const LIMITS: Limits = Limits { own_bytes: 0, group_percent: 100 };

    fn v2(current: &str, high: &str, max: &str, pressure: &str) -> Pressure {
        let os = FakeKernel::new(4096);
        os.put_file("/proc/self/cgroup", "0::/a/b\n");
        os.put_file("/sys/fs/cgroup/a/b/memory.current", current);
        os.put_file("/sys/fs/cgroup/a/b/memory.high", high);
        os.put_file("/sys/fs/cgroup/a/b/memory.max", max);
        os.put_file("/sys/fs/cgroup/a/b/memory.pressure", pressure);
        look(&os, LIMITS, 0)
    }

    #[test]
    fn a_limit_of_our_own() {
        let os = FakeKernel::new(4096);
        let limits = Limits { own_bytes: 1600, group_percent: 0 };
        assert_eq!(look(&os, limits, 1499), Pressure::None);
        assert_eq!(look(&os, limits, 1500), Pressure::Cold);
        assert_eq!(look(&os, limits, 1600), Pressure::Warm);
        assert_eq!(look(&os, LIMITS, u64::MAX), Pressure::None, "nothing to read, nothing presses");
    }

    #[test]
    fn the_lower_of_high_and_max_counts() {
        assert_eq!(v2("900\n", "max\n", "max\n", ""), Pressure::None);
        assert_eq!(v2("900\n", "max\n", "1600\n", ""), Pressure::None);
        assert_eq!(v2("1500\n", "max\n", "1600\n", ""), Pressure::Cold);
        assert_eq!(v2("1500\n", "1500\n", "1600\n", ""), Pressure::Warm);
        assert_eq!(v2("nonsense", "1500\n", "1600\n", "some avg10="), Pressure::None);
    }

    #[test]
    fn tasks_that_wait_for_memory_press() {
        let psi = |some: &str, full: &str| {
            std::format!(
                "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=9.00 avg300=0.00 total=1\n"
            )
        };
        assert_eq!(v2("1", "max", "max", &psi("19.99", "0.00")), Pressure::None);
        assert_eq!(v2("1", "max", "max", &psi("20.00", "9.99")), Pressure::Cold);
        assert_eq!(v2("1", "max", "max", &psi("30.00", "10.00")), Pressure::Warm);
    }

    #[test]
    fn version_1_and_a_group_mounted_as_root() {
        let os = FakeKernel::new(4096);
        os.put_file("/proc/self/cgroup", "5:cpu,memory:/job\n0::/other\n");
        os.put_file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1600\n");
        os.put_file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1600\n");
        assert_eq!(look(&os, LIMITS, 0), Pressure::Warm);
        os.put_file("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "100\n");
        assert_eq!(look(&os, LIMITS, 0), Pressure::None, "the group's own file comes first");
        let half = Limits { own_bytes: 0, group_percent: 5 };
        assert_eq!(look(&os, half, 0), Pressure::Warm);
    }

    #[test]
    fn this_machine_is_read_without_a_fault() {
        let _ = look(&crate::os::linux::Linux, LIMITS, 0);
    }
}
