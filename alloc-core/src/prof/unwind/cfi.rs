//! Call frame information: from an address to the rules by which its caller is found.
//!
//! It reads `.eh_frame_hdr` (a sorted table of functions), the function's FDE and its CIE, and runs
//! their instructions up to the address. Everything lies in a loaded module; lengths are checked, so that
//! a table with errors in it costs a stack and no more.

/// A rule that gives a register's value in the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// It is what it is in this frame.
    Same,
    /// It is lost; for the return address: there is no caller.
    Undefined,
    /// It lies at this distance from the canonical frame address.
    At(i64),
    /// It is this distance from the canonical frame address.
    Is(i64),
    /// It lies where the expression says, or is what it says.
    AtExpression(Bytes),
    IsExpression(Bytes),
}

/// How the canonical frame address is found: the stack pointer in the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cfa {
    Register(u64, i64),
    Expression(Bytes),
}

/// The rules at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) cfa: Cfa,
    pub(super) fp: Rule,
    pub(super) pc: Rule,
}

/// What is known of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) row: Row,
    /// It is the frame of a signal handler's return: its caller was interrupted.
    pub(super) signal: bool,
}

/// DWARF's numbers of the registers that matter.
pub(super) const FP: u64 = 6;
pub(super) const SP: u64 = 7;
pub(super) const PC: u64 = 16;

/// Rows that may be remembered at a time.
const MOST_REMEMBERED: usize = 4;
/// Longest FDE or CIE.
const MOST_BYTES: usize = 1 << 20;

/// Bytes of a loaded module, read one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes {
    at: usize,
    end: usize,
}

impl Bytes {
    /// # Safety
    /// The range is mapped and readable as long as the result, and what comes of it, is used.
    pub(super) unsafe fn new(at: usize, end: usize) -> Self {
        Self { at, end }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at >= self.end
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let after = self.at.checked_add(N)?;
        if after > self.end {
            return None;
        }
        // SAFETY: within the range, which can be read, says whoever made it.
        let bytes = unsafe { core::ptr::with_exposed_provenance::<[u8; N]>(self.at).read() };
        self.at = after;
        Some(bytes)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn i32(&mut self) -> Option<i64> {
        self.array().map(|bytes| i64::from(i32::from_le_bytes(bytes)))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn uleb(&mut self) -> Option<u64> {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = self.u8()?;
            if shift < 64 {
                value |= u64::from(byte & 0x7F) << shift;
            }
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    }

    pub(super) fn sleb(&mut self) -> Option<i64> {
        let (mut value, mut shift) = (0i64, 0);
        loop {
            let byte = self.u8()?;
            if shift < 64 {
                value |= i64::from(byte & 0x7F) << shift;
            }
            shift += 7;
            if byte & 0x80 == 0 {
                let negative = byte & 0x40 != 0 && shift < 64;
                return Some(if negative { value | -1 << shift } else { value });
            }
        }
    }

    /// The next `len` bytes, as a range of their own.
    pub(super) fn take(&mut self, len: u64) -> Option<Bytes> {
        let after = usize::try_from(len).ok()?.checked_add(self.at)?;
        if after > self.end {
            return None;
        }
        let taken = Bytes { at: self.at, end: after };
        self.at = after;
        Some(taken)
    }

    /// An address in the encoding `how`; `base` is what `DW_EH_PE_datarel` counts from.
    fn pointer(&mut self, how: u8, base: usize) -> Option<usize> {
        let here = self.at;
        let value = match how & 0x0F {
            0x00 | 0x04 | 0x0C => self.u64()?.cast_signed(),
            0x01 => self.uleb()?.cast_signed(),
            0x02 => i64::from(self.u16()?),
            0x03 => i64::from(self.u32()?),
            0x09 => self.sleb()?,
            0x0A => i64::from(i16::from_le_bytes(self.array()?)),
            0x0B => self.i32()?,
            _ => return None,
        };
        let from = match how & 0x70 {
            0x00 => 0,
            0x10 => here,
            0x30 => base,
            _ => return None,
        };
        // 0x80: the address of the address. Only a personality has that, whose value nobody needs.
        Some(from.wrapping_add_signed(isize::try_from(value).ok()?))
    }
}

/// Nothing is known of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotFound;

/// The rules at `pc` in the module whose `.eh_frame_hdr` lies at `header`.
///
/// # Safety
/// That table and the `.eh_frame` that it points to are mapped and stay for the call.
pub(super) unsafe fn rules(header: usize, pc: usize) -> Result<Rules, NotFound> {
    // SAFETY: the caller's promise.
    let fde = unsafe { find_fde(header, pc) }.ok_or(NotFound)?;
    // SAFETY: as above.
    unsafe { run(fde, pc) }.ok_or(NotFound)
}

/// The FDE of the last function that begins at or before `pc`.
unsafe fn find_fde(header: usize, pc: usize) -> Option<usize> {
    // SAFETY: the header has at least these bytes.
    let mut bytes = unsafe { Bytes::new(header, header + 24) };
    let [version, frame_how, count_how, table_how] = bytes.array()?;
    // What linkers write: entries of two 32-bit distances from the header.
    if version != 1 || table_how != 0x3B {
        return None;
    }
    bytes.pointer(frame_how, header)?;
    let count = bytes.pointer(count_how, header)?;
    let table = bytes.at;
    let entry = |i: usize| {
        let at = table + i * 8;
        // SAFETY: the table has `count` entries of eight bytes.
        let mut entry = unsafe { Bytes::new(at, at + 8) };
        let [start, fde] = [entry.i32()?, entry.i32()?];
        let absolute =
            |distance: i64| Some(header.wrapping_add_signed(isize::try_from(distance).ok()?));
        Some((absolute(start)?, absolute(fde)?))
    };
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low.midpoint(high);
        if entry(middle)?.0 <= pc { low = middle + 1 } else { high = middle }
    }
    entry(low.checked_sub(1)?).map(|(_, fde)| fde)
}

/// The part of `.eh_frame` at `at`: after its length.
unsafe fn part(at: usize) -> Option<Bytes> {
    // SAFETY: a part begins with its length.
    let len = unsafe { Bytes::new(at, at + 4) }.u32()? as usize;
    if len == 0 || len > MOST_BYTES {
        return None;
    }
    // SAFETY: it is as long as it says.
    Some(unsafe { Bytes::new(at + 4, at + 4 + len) })
}

/// What a CIE says to all its functions.
struct Common {
    code_align: u64,
    data_align: i64,
    pointer_how: u8,
    has_length: bool,
    signal: bool,
    program: Bytes,
}

unsafe fn common(at: usize) -> Option<Common> {
    // SAFETY: the caller's promise.
    let mut bytes = unsafe { part(at) }?;
    let (id, version) = (bytes.u32()?, bytes.u8()?);
    if id != 0 || !matches!(version, 1 | 3) {
        return None;
    }
    let mut letters = bytes;
    while bytes.u8()? != 0 {}
    let (code_align, data_align) = (bytes.uleb()?, bytes.sleb()?);
    if version == 1 {
        u64::from(bytes.u8()?)
    } else {
        bytes.uleb()?
    };
    let mut common = Common {
        code_align,
        data_align,
        pointer_how: 0,
        has_length: false,
        signal: false,
        program: bytes,
    };
    let mut data = bytes;
    loop {
        match letters.u8()? {
            0 => break,
            b'z' => {
                common.has_length = true;
                let len = bytes.uleb()?;
                data = bytes.take(len)?;
                common.program = bytes;
            }
            b'R' => common.pointer_how = data.u8()?,
            b'L' => drop(data.u8()?),
            b'P' => {
                let how = data.u8()?;
                data.pointer(how & 0x0F, 0)?;
            }
            b'S' => common.signal = true,
            b'B' => {}
            _ => return None,
        }
    }
    Some(common)
}

unsafe fn run(fde: usize, pc: usize) -> Option<Rules> {
    // SAFETY: the caller's promise.
    let mut bytes = unsafe { part(fde) }?;
    let field = bytes.at;
    let distance = bytes.u32()? as usize;
    // SAFETY: an FDE has the distance back to its CIE.
    let common = unsafe { common(field.checked_sub(distance)?) }?;
    let start = bytes.pointer(common.pointer_how, 0)?;
    let len = bytes.pointer(common.pointer_how & 0x0F, 0)?;
    if pc.wrapping_sub(start) >= len {
        return None;
    }
    if common.has_length {
        let len = bytes.uleb()?;
        bytes.take(len)?;
    }
    let row = Row { cfa: Cfa::Register(SP, 8), fp: Rule::Same, pc: Rule::At(-8) };
    let mut machine = Machine {
        row,
        initial: row,
        saved: [row; MOST_REMEMBERED],
        depth: 0,
        at: start,
        common: &common,
    };
    machine.run(common.program, usize::MAX)?;
    machine.initial = machine.row;
    machine.at = start;
    machine.run(bytes, pc)?;
    Some(Rules { row: machine.row, signal: common.signal })
}

struct Machine<'a> {
    row: Row,
    /// The row after the CIE's instructions.
    initial: Row,
    saved: [Row; MOST_REMEMBERED],
    depth: usize,
    at: usize,
    common: &'a Common,
}

impl Machine<'_> {
    /// Runs the instructions that hold at `pc`.
    fn run(&mut self, mut code: Bytes, pc: usize) -> Option<()> {
        while !code.is_empty() {
            let op = code.u8()?;
            let low = u64::from(op & 0x3F);
            match op >> 6 {
                1 => {
                    if self.advance(low, pc) {
                        return Some(());
                    }
                }
                2 => {
                    let distance = self.factored(code.uleb()?)?;
                    self.set(low, Rule::At(distance));
                }
                3 => self.restore(low),
                _ => {
                    if self.other(op, &mut code, pc)? {
                        return Some(());
                    }
                }
            }
        }
        Some(())
    }

    /// True: what follows holds only behind `pc`.
    fn advance(&mut self, delta: u64, pc: usize) -> bool {
        let bytes = delta.wrapping_mul(self.common.code_align);
        #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
        let next = self.at.wrapping_add(bytes as usize);
        if next > pc {
            return true;
        }
        self.at = next;
        false
    }

    fn factored(&self, distance: u64) -> Option<i64> {
        i64::try_from(distance).ok()?.checked_mul(self.common.data_align)
    }

    fn set(&mut self, register: u64, rule: Rule) {
        match register {
            FP => self.row.fp = rule,
            PC => self.row.pc = rule,
            _ => {}
        }
    }

    fn restore(&mut self, register: u64) {
        match register {
            FP => self.row.fp = self.initial.fp,
            PC => self.row.pc = self.initial.pc,
            _ => {}
        }
    }

    /// An instruction with a byte of its own. True: as [`Self::advance`].
    fn other(&mut self, op: u8, code: &mut Bytes, pc: usize) -> Option<bool> {
        match op {
            0x00 => {}
            0x01 => {
                let to = code.pointer(self.common.pointer_how, 0)?;
                if to > pc {
                    return Some(true);
                }
                self.at = to;
            }
            0x02 => return Some(self.advance(u64::from(code.u8()?), pc)),
            0x03 => return Some(self.advance(u64::from(code.u16()?), pc)),
            0x04 => return Some(self.advance(u64::from(code.u32()?), pc)),
            0x05 => {
                let (register, distance) = (code.uleb()?, code.uleb()?);
                let distance = self.factored(distance)?;
                self.set(register, Rule::At(distance));
            }
            0x06 => {
                let register = code.uleb()?;
                self.restore(register);
            }
            0x07 => self.set(code.uleb()?, Rule::Undefined),
            0x08 => self.set(code.uleb()?, Rule::Same),
            // Another register has it: not one that is followed here.
            0x09 => {
                let (register, _) = (code.uleb()?, code.uleb()?);
                self.set(register, Rule::Undefined);
            }
            0x0A => {
                *self.saved.get_mut(self.depth)? = self.row;
                self.depth += 1;
            }
            0x0B => {
                self.depth = self.depth.checked_sub(1)?;
                self.row = *self.saved.get(self.depth)?;
            }
            0x0C => {
                let (register, distance) = (code.uleb()?, code.uleb()?);
                self.row.cfa = Cfa::Register(register, i64::try_from(distance).ok()?);
            }
            0x0D => {
                let register = code.uleb()?;
                let Cfa::Register(_, distance) = self.row.cfa else { return None };
                self.row.cfa = Cfa::Register(register, distance);
            }
            0x0E => {
                let distance = i64::try_from(code.uleb()?).ok()?;
                let Cfa::Register(register, _) = self.row.cfa else { return None };
                self.row.cfa = Cfa::Register(register, distance);
            }
            0x0F => {
                let len = code.uleb()?;
                self.row.cfa = Cfa::Expression(code.take(len)?);
            }
            0x10 | 0x16 => {
                let (register, len) = (code.uleb()?, code.uleb()?);
                let expression = code.take(len)?;
                let at = op == 0x10;
                self.set(
                    register,
                    if at {
                        Rule::AtExpression(expression)
                    } else {
                        Rule::IsExpression(expression)
                    },
                );
            }
            0x11 => {
                let (register, distance) = (code.uleb()?, code.sleb()?);
                self.set(register, Rule::At(distance.checked_mul(self.common.data_align)?));
            }
            0x12 => {
                let (register, distance) = (code.uleb()?, code.sleb()?);
                self.row.cfa =
                    Cfa::Register(register, distance.checked_mul(self.common.data_align)?);
            }
            0x13 => {
                let distance = code.sleb()?.checked_mul(self.common.data_align)?;
                let Cfa::Register(register, _) = self.row.cfa else { return None };
                self.row.cfa = Cfa::Register(register, distance);
            }
            0x14 | 0x15 => {
                let register = code.uleb()?;
                let distance = if op == 0x14 { code.uleb()?.cast_signed() } else { code.sleb()? };
                self.set(register, Rule::Is(distance.checked_mul(self.common.data_align)?));
            }
            // The size of the arguments that a call leaves on the stack.
            0x2E => drop(code.uleb()?),
            _ => return None,
        }
        Some(false)
    }
}

/// Runs a DWARF expression. `register` gives the registers that are known, `read` a word of memory; `start`
/// is on the stack when it begins.
pub(super) fn evaluate(
    mut code: Bytes,
    start: Option<usize>,
    register: impl Fn(u64) -> Option<usize>,
    mut read: impl FnMut(usize) -> Option<usize>,
) -> Option<usize> {
    let mut stack = Operands { words: [0; 16], len: 0 };
    if let Some(start) = start {
        stack.push(start as u64)?;
    }
    while !code.is_empty() {
        let op = code.u8()?;
        let constant = match op {
            0x03 | 0x0E => Some(code.u64()?),
            0x08 => Some(u64::from(code.u8()?)),
            0x09 => Some(i64::from(code.u8()?.cast_signed()).cast_unsigned()),
            0x0A => Some(u64::from(code.u16()?)),
            0x0B => Some(i64::from(code.u16()?.cast_signed()).cast_unsigned()),
            0x0C => Some(u64::from(code.u32()?)),
            0x0D => Some(code.i32()?.cast_unsigned()),
            0x0F => Some(code.u64()?),
            0x10 => Some(code.uleb()?),
            0x11 => Some(code.sleb()?.cast_unsigned()),
            0x30..=0x4F => Some(u64::from(op - 0x30)),
            0x70..=0x8F => {
                let distance = code.sleb()?;
                Some((register(u64::from(op - 0x70))? as u64).wrapping_add_signed(distance))
            }
            _ => None,
        };
        if let Some(constant) = constant {
            stack.push(constant)?;
            continue;
        }
        let top = stack.pop()?;
        #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
        match op {
            0x06 => stack.push(read(top as usize)? as u64)?,
            0x12 => {
                stack.push(top)?;
                stack.push(top)?;
            }
            0x13 => {}
            0x1F => stack.push(top.wrapping_neg())?,
            0x20 => stack.push(!top)?,
            0x23 => stack.push(top.wrapping_add(code.uleb()?))?,
            _ => {
                let below = stack.pop()?;
                let less = below.cast_signed() < top.cast_signed();
                let shift = top.min(63) as u32;
                match op {
                    0x14 => {
                        stack.push(below)?;
                        stack.push(top)?;
                    }
                    0x16 => stack.push(top)?,
                    _ => {}
                }
                stack.push(match op {
                    0x14 | 0x16 => below,
                    0x1A => below & top,
                    0x1C => below.wrapping_sub(top),
                    0x1E => below.wrapping_mul(top),
                    0x21 => below | top,
                    0x22 => below.wrapping_add(top),
                    0x24 => {
                        if top > 63 {
                            0
                        } else {
                            below << shift
                        }
                    }
                    0x25 => {
                        if top > 63 {
                            0
                        } else {
                            below >> shift
                        }
                    }
                    0x27 => below ^ top,
                    0x29 => u64::from(below == top),
                    0x2A => u64::from(!less),
                    0x2B => u64::from(!less && below != top),
                    0x2C => u64::from(less || below == top),
                    0x2D => u64::from(less),
                    0x2E => u64::from(below != top),
                    _ => return None,
                })?;
            }
        }
    }
    #[allow(clippy::cast_possible_truncation, reason = "64-bit only")]
    stack.pop().map(|word| word as usize)
}

struct Operands {
    words: [u64; 16],
    len: usize,
}

impl Operands {
    fn push(&mut self, word: u64) -> Option<()> {
        *self.words.get_mut(self.len)? = word;
        self.len += 1;
        Some(())
    }

    fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        self.words.get(self.len).copied()
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;

    fn bytes(text: &'static [u8]) -> Bytes {
        let at = text.as_ptr().expose_provenance();
        // SAFETY: a static.
        unsafe { Bytes::new(at, at + text.len()) }
    }

    fn run(code: &'static [u8]) -> Option<usize> {
        let register = |register| (register == SP).then_some(0x1000);
        evaluate(bytes(code), None, register, |at| Some(at + 1))
    }

    #[test]
    fn numbers_of_any_length() {
        assert_eq!(bytes(&[0xE5, 0x8E, 0x26]).uleb(), Some(624_485));
        assert_eq!(bytes(&[0x80, 0x7F]).sleb(), Some(-128));
        assert_eq!(bytes(&[0x7F]).sleb(), Some(-1));
        assert_eq!(bytes(&[0x80]).uleb(), None);
        let long = bytes(&[0xFF; 12]).uleb();
        assert_eq!(long, None);
    }

    #[test]
    fn expressions() {
        // The one of a signal frame: the word at rsp + 160.
        assert_eq!(run(&[0x77, 0xA0, 0x01, 0x06]), Some(0x10A1));
        // The one of a PLT entry: rsp + 8 + ((rip & 15) >= 11) * 8, with another register for rip.
        let plt = &[0x77, 8, 0x77, 0, 0x3F, 0x1A, 0x3B, 0x2A, 0x33, 0x24, 0x22];
        assert_eq!(run(plt), Some(0x1008));
        assert_eq!(run(&[0x35, 0x33, 0x16, 0x1C]), Some(3usize.wrapping_sub(5)));
        assert_eq!(run(&[0x35, 0x33, 0x14, 0x1C, 0x1C]), Some(7));
        assert_eq!(run(&[0x35, 0x12, 0x22, 0x23, 0x05]), Some(15));
        assert_eq!(run(&[0x09, 0xFF, 0x30, 0x2D]), Some(1));
        for wrong in [&[0x06][..], &[0x76, 0], &[0xFF], &[0x22], &[0x08], &[]] {
            assert_eq!(evaluate(bytes(Box::leak(wrong.into())), None, |_| None, Some), None);
        }
    }

    use std::boxed::Box;

    #[test]
    fn a_thousand_constants_do_not_fit() {
        assert_eq!(run(&[0x31; 1000]), None);
    }

    #[test]
    fn any_table_is_survived() {
        let mut random = 1u64;
        for round in 0..2000usize {
            let table: std::vec::Vec<u8> = (0..256)
                .map(|i| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Well-formed enough to get into the instructions.
                    match i {
                        0 => 60,
                        64 => 120,
                        1..=3 | 65..=67 | 4..=7 => 0,
                        8 => 1,
                        9 => b'z',
                        10 => b'R',
                        11 => 0,
                        12..=13 => 1 + (round % 3) as u8,
                        14 => 16,
                        15 => 1,
                        16 => 0x1B,
                        68 => 68,
                        69..=71 => 0,
                        72..=75 => [0, 0, 0, 0][i - 72],
                        76..=79 => [0, 1, 0, 0][i - 76],
                        80 => 0,
                        _ => (random >> 33) as u8,
                    }
                })
                .collect();
            let at = table.as_ptr().expose_provenance();
            for delta in 0..20 {
                // SAFETY: lengths lead nowhere else than into the table.
                let _ = unsafe { super::run(at + 64, at + 72 + delta * 8) };
            }
        }
    }
}
