//! User and group of a thread that libc does not know. `setuid` and its kin change the calling
//! thread only; libc asks every thread that it started to do the same. Ours has to look by itself,
//! or it would stay root in a process that is not.
use super::linux;

/// User and group: real, effective, saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ids {
    user: [u32; 3],
    group: [u32; 3],
}

/// Gives up root for the calling thread if the process's first thread has done so.
pub(crate) fn follow_leader() {
    if linux::geteuid() != 0 {
        return;
    }
    let mut buffer = [0; 1024];
    let Ok(len) = linux::read_file(c"/proc/self/status", &mut buffer) else { return };
    if let Some(ids) = parse(&buffer[..len])
        && ids.user != [0; 3]
    {
        linux::set_thread_ids(ids.user, ids.group);
    }
}

/// The lines `Uid:` and `Gid:` of a `status` file.
fn parse(status: &[u8]) -> Option<Ids> {
    Some(Ids { user: three(status, b"Uid:")?, group: three(status, b"Gid:")? })
}

fn three(status: &[u8], key: &[u8]) -> Option<[u32; 3]> {
    let line = status.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(key))?;
    let mut ids = [0u32; 3];
    let mut fields = line.split(|b| b.is_ascii_whitespace()).filter(|f| !f.is_empty());
    for id in &mut ids {
        *id = fields.next()?.iter().try_fold(0u32, |n, &digit| {
            let digit = (digit as char).to_digit(10)?;
            n.checked_mul(10)?.checked_add(digit)
        })?;
    }
    Some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_lines() {
        let status = b"Name:\tx\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t7\t8\nFDSize:\t64\n";
        let ids = Ids { user: [1000, 1001, 1002], group: [5, 6, 7] };
        assert_eq!(parse(status), Some(ids));
        assert_eq!(parse(b"Uid:\tx\n"), None);
        assert_eq!(parse(b"Uid:\t1\t2\n"), None);
        let mut buffer = [0; 1024];
        let len = linux::read_file(c"/proc/self/status", &mut buffer).unwrap();
        let own = parse(&buffer[..len]).unwrap();
        assert_eq!(own.user[1], linux::geteuid());
    }
}
