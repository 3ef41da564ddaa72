//! x86-64: a frame's caller by call frame information, through a cache of rules by address.
//!
//! An entry of the cache is two words, the second of which is the rule and the first the address and
//! the rule by exclusive or: an entry that two threads wrote at once fits no address. A rule from
//! before a module went away may give a wrong stack, never a fault: the stack is read with care.
use super::super::map;
use super::cfi::{self, Cfa, FP, NotFound, PC, Row, Rule, Rules, SP};
use super::stack::Stack;
use super::{Caller, Frame, by_frame_pointer, modules};
use crate::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

const SLOTS: usize = 1 << 14;

static CACHE: AtomicPtr<[AtomicU64; 2]> = AtomicPtr::new(core::ptr::null_mut());
/// Part of every rule in the cache: what was put in before it changed is not found any more.
static GENERATION: AtomicU32 = AtomicU32::new(0);

pub(super) fn prepare() -> bool {
    if !CACHE.load(Relaxed).is_null() {
        return true;
    }
    let fresh: *mut [AtomicU64; 2] = map(SLOTS * size_of::<[AtomicU64; 2]>()).cast();
    let null = core::ptr::null_mut();
    !fresh.is_null() && CACHE.compare_exchange(null, fresh, AcqRel, Acquire).is_ok()
        || !CACHE.load(Relaxed).is_null()
}

pub(super) fn modules_changed() {
    GENERATION.fetch_add(1, Relaxed);
}

/// The frame of the function that this is part of.
#[inline(always)]
pub(super) fn here() -> Frame {
    let (pc, sp, fp): (usize, usize, usize);
    // SAFETY: reads registers.
    unsafe {
        core::arch::asm!(
            "lea {}, [rip]",
            "mov {}, rsp",
            "mov {}, rbp",
            out(reg) pc, out(reg) sp, out(reg) fp,
            options(nomem, nostack, preserves_flags)
        );
    }
    Frame { pc, sp, fp, exact: true }
}

/// A rule that fits into a word, which nearly all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Short {
    /// The frame ends here.
    End,
    /// The rules have to be looked at.
    Long,
    /// No module: generated code, which may keep frame pointers.
    NoModule,
    /// The module says nothing of this address: the start of a fiber, assembly.
    NoRules,
    /// The stack pointer in the caller is this register and so many bytes; the caller's frame pointer lies
    /// so many words below that (0: it is still in its register); the return address lies just below.
    Plain { from_fp: bool, bytes: u32, fp_words: u16 },
}

impl Short {
    fn pack(self, generation: u32) -> u64 {
        let (kind, rest) = match self {
            Short::End => (1, 0),
            Short::Long => (2, 0),
            Short::NoModule => (3, 0),
            Short::NoRules => (6, 0),
            Short::Plain { from_fp, bytes, fp_words } => {
                (4 + u64::from(from_fp), u64::from(bytes) << 16 | u64::from(fp_words))
            }
        };
        // 13 bits of the generation, 48 of the rule, 3 of the kind.
        u64::from(generation & 0x1FFF) << 51 | rest << 3 | kind
    }

    fn unpack(word: u64, generation: u32) -> Option<Self> {
        if word >> 51 != u64::from(generation & 0x1FFF) {
            return None;
        }
        let rest = word >> 3 & 0xFFFF_FFFF_FFFF;
        #[allow(clippy::cast_possible_truncation, reason = "takes the word apart")]
        let (bytes, fp_words) = ((rest >> 16) as u32, rest as u16);
        match word & 7 {
            1 => Some(Short::End),
            2 => Some(Short::Long),
            3 => Some(Short::NoModule),
            6 => Some(Short::NoRules),
            kind @ (4 | 5) => Some(Short::Plain { from_fp: kind == 5, bytes, fp_words }),
            _ => None,
        }
    }

    fn of(rules: &Rules) -> Self {
        if rules.row.pc == Rule::Undefined {
            return Short::End;
        }
        let Row { cfa: Cfa::Register(register @ (SP | FP), bytes), fp, pc: Rule::At(-8) } =
            rules.row
        else {
            return Short::Long;
        };
        let fp_words = match fp {
            Rule::Same => Some(0),
            Rule::At(distance) if distance < 0 && distance % 8 == 0 => {
                u16::try_from(-distance / 8).ok()
            }
            _ => None,
        };
        match (u32::try_from(bytes), fp_words) {
            (Ok(bytes), Some(fp_words)) if !rules.signal => {
                Short::Plain { from_fp: register == FP, bytes, fp_words }
            }
            _ => Short::Long,
        }
    }
}

pub(super) fn caller(frame: Frame, stack: &mut Stack) -> Caller {
    // A call may be the last instruction of its function: look at the byte before.
    let pc = if frame.exact { frame.pc } else { frame.pc.wrapping_sub(1) };
    match short(pc) {
        Short::Plain { from_fp, bytes, fp_words } => {
            let base = if from_fp { frame.fp } else { frame.sp };
            let sp = base.wrapping_add(bytes as usize);
            let fp = match fp_words {
                0 => Some(frame.fp),
                words => stack.read(sp.wrapping_sub(usize::from(words) * 8)),
            };
            let above = sp > frame.sp;
            match (stack.read(sp.wrapping_sub(8)), fp) {
                (Some(pc), Some(fp)) if above => up(Frame { pc, sp, fp, exact: false }),
                _ => Caller::Unknown,
            }
        }
        Short::End => Caller::End,
        Short::Long => by_rules(pc, frame, stack),
        Short::NoModule => by_frame_pointer(frame, stack),
        Short::NoRules => Caller::Unknown,
    }
}

fn up(frame: Frame) -> Caller {
    if frame.pc == 0 { Caller::End } else { Caller::Frame(frame) }
}

/// The rule for `pc`, from the cache or into it.
#[inline]
fn short(pc: usize) -> Short {
    let cache = CACHE.load(Acquire);
    if cache.is_null() {
        return look_up_short(pc);
    }
    let generation = GENERATION.load(Relaxed);
    #[allow(clippy::cast_possible_truncation, reason = "the upper half, reduced to the slots")]
    let slot = ((pc as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % SLOTS;
    // SAFETY: the cache has that many entries, atomics that were zero when new, and stays.
    let [key, rule] = unsafe { &*cache.wrapping_add(slot) };
    let word = rule.load(Relaxed);
    if key.load(Relaxed) ^ word == pc as u64
        && let Some(short) = Short::unpack(word, generation)
    {
        return short;
    }
    let short = look_up_short(pc);
    let word = short.pack(generation);
    rule.store(word, Relaxed);
    key.store(pc as u64 ^ word, Relaxed);
    short
}

#[cold]
#[inline(never)]
fn look_up_short(pc: usize) -> Short {
    match look_up(pc) {
        None => Short::NoModule,
        Some(Err(NotFound)) => Short::NoRules,
        Some(Ok(rules)) => Short::of(&rules),
    }
}

/// The rules of an address; nothing where it is in no module.
fn look_up(pc: usize) -> Option<Result<Rules, NotFound>> {
    let header = modules::eh_frame_hdr(pc)?;
    // SAFETY: the loader has mapped the table, and who is on our stack isn't unloaded.
    Some(unsafe { cfi::rules(header, pc) })
}

/// The caller by rules of any kind.
#[cold]
#[inline(never)]
fn by_rules(pc: usize, frame: Frame, stack: &mut Stack) -> Caller {
    let Some(Ok(rules)) = look_up(pc) else { return Caller::Unknown };
    let register = |register| match register {
        SP => Some(frame.sp),
        FP => Some(frame.fp),
        PC => Some(frame.pc),
        _ => None,
    };
    let cfa = match rules.row.cfa {
        Cfa::Register(from, distance) => isize::try_from(distance)
            .ok()
            .and_then(|distance| Some(register(from)?.wrapping_add_signed(distance))),
        Cfa::Expression(code) => cfi::evaluate(code, None, register, |at| stack.read(at)),
    };
    let Some(sp) = cfa else { return Caller::Unknown };
    let from = |distance: i64| isize::try_from(distance).ok().map(|d| sp.wrapping_add_signed(d));
    let mut value = |rule: Rule, same: usize| match rule {
        Rule::Same => Some(same),
        Rule::Undefined => None,
        Rule::At(distance) => stack.read(from(distance)?),
        Rule::Is(distance) => from(distance),
        Rule::AtExpression(code) => {
            let at = cfi::evaluate(code, Some(sp), register, |at| stack.read(at))?;
            stack.read(at)
        }
        Rule::IsExpression(code) => cfi::evaluate(code, Some(sp), register, |at| stack.read(at)),
    };
    // A frame pointer that is lost ends the walk only if somebody needs it.
    let fp = value(rules.row.fp, frame.fp).unwrap_or(0);
    match value(rules.row.pc, frame.pc) {
        // A handler may run on a stack above or below the one that it interrupted.
        Some(pc) if sp > frame.sp || rules.signal => up(Frame { pc, sp, fp, exact: rules.signal }),
        _ => Caller::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_fit_into_a_word() {
        let shorts = [
            Short::End,
            Short::Long,
            Short::NoModule,
            Short::NoRules,
            Short::Plain { from_fp: true, bytes: u32::MAX, fp_words: u16::MAX },
            Short::Plain { from_fp: false, bytes: 8, fp_words: 0 },
        ];
        for short in shorts {
            assert_eq!(Short::unpack(short.pack(5), 5), Some(short));
            assert_eq!(Short::unpack(short.pack(5), 6), None, "of another generation");
        }
        assert_eq!(Short::unpack(0, 0), None, "an empty slot");
    }

    #[test]
    fn the_cache_says_what_the_tables_say() {
        assert!(prepare());
        let start = caller as *const () as usize;
        for pc in start..start + 400 {
            let table = look_up_short(pc);
            assert_eq!((short(pc), short(pc)), (table, table));
        }
        let before = short(start);
        modules_changed();
        assert_eq!(short(start), before);
    }
}
