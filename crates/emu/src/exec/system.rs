//! Instructions that the emulator does not implement, and the functions of the CUDA runtime that a module may
//! call without defining them: `__assertfail` (`assert`) and `vprintf` (`printf`).

use ptx::Space;

use super::Env;
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, Warp};
use crate::EmuError;
use crate::decode::{Inst, Special, SystemCall};
use crate::memory::{LOCAL_BASE, resolve};
use crate::report::{HazardKind, Printed};

/// Maximum length in bytes of a string in a message, and of the text of one `printf`.
const LONGEST: usize = 1024;
/// Maximum number of `printf` texts that are kept for a cluster. A GPU's buffer holds 1 MB for the whole
/// grid.
const MOST_PRINTED: usize = 1024;

impl Env<'_> {
    pub(super) fn execute_special(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        special: &Special,
        mask: u32,
    ) -> Flow {
        match special {
            Special::Unsupported(what) => {
                self.log.stopped = Some(EmuError::Unsupported { line: inst.line, what: what.clone() });
                Flow::Yield
            }
            Special::Assert(call) => {
                let lane = mask.trailing_zeros() as usize;
                let [message, file, line, function] =
                    [0, 1, 2, 3].map(|at| self.argument(warp, call, at, lane));
                let [message, file, function] = [message, file, function].map(|at| self.text(warp, lane, at));
                let line = line as u32;
                self.report(HazardKind::AssertionFailed, inst, warp.index, lane, None, || {
                    format!("the assertion `{message}` of {function} ({file}, line {line}) fails")
                });
                self.exit(warp, split, mask)
            }
            Special::Print(call) => {
                self.check_local(warp, inst, mask);
                for_lanes(mask, |lane| {
                    let [format, values] = [0, 1].map(|at| self.argument(warp, call, at, lane));
                    let format = self.text(warp, lane, format);
                    let (text, count) = self.formatted(warp, lane, &format, values);
                    let thread = self.thread(warp.index, lane);
                    self.log.counters.prints += 1;
                    if self.log.printed.len() < MOST_PRINTED {
                        self.log.printed.push(Printed { thread, text });
                    }
                    if let Some(result) = call.result {
                        let at =
                            frame(warp, self.facts.context.program.frame_pointer, lane) + result as usize;
                        warp.local.store(lane, at, 4, &[count, 0, 0, 0, 0, 0, 0, 0]);
                    }
                });
                Flow::Next
            }
        }
    }

    /// An argument of 8 bytes, or of 4 bytes if the call passes only 4; 0 if it is missing.
    fn argument(&self, warp: &Warp, call: &SystemCall, at: usize, lane: usize) -> u64 {
        let Some(&(offset, bytes)) = call.arguments.get(at) else { return 0 };
        let at = frame(warp, self.facts.context.program.frame_pointer, lane) + offset as usize;
        let chunk = warp.local.load(lane, at, bytes.min(8) as usize);
        u64::from(chunk[0]) | u64::from(chunk[1]) << 32
    }

    /// A byte at a generic address; `None` outside of all memory that holds strings and arguments.
    fn byte(&self, warp: &Warp, lane: usize, address: u64) -> Option<u8> {
        let (space, at) = resolve(address);
        match space {
            Space::Global => {
                let (region, offset) = self.facts.context.global.find(at)?;
                let offset = usize::try_from(offset).ok().filter(|offset| *offset < region.bytes)?;
                Some(region.load(offset, 1)[0] as u8)
            }
            Space::Local => {
                let offset = at.checked_sub(LOCAL_BASE)? as usize;
                (offset < warp.local.bytes()).then(|| warp.local.load(lane, offset, 1)[0] as u8)
            }
            Space::Const => {
                let offset = at.checked_sub(crate::memory::CONST_BASE)? as usize;
                self.facts.context.program.layout.constants.get(offset).copied()
            }
            _ => None,
        }
    }

    /// The string at a generic address, up to its zero byte.
    fn text(&self, warp: &Warp, lane: usize, address: u64) -> String {
        let bytes = (0..LONGEST as u64).map_while(|i| self.byte(warp, lane, address.wrapping_add(i)));
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The text of a `printf` and the number of its values. The values are stored one after the other, each
    /// at a multiple of its size: 4 bytes for an `int`, 8 for a `double`, a `long` or a pointer.
    fn formatted(&self, warp: &Warp, lane: usize, format: &str, values: u64) -> (String, u32) {
        let (mut at, mut count) = (values, 0);
        let mut next = |bytes: u64| {
            at = at.next_multiple_of(bytes);
            let value = (0..bytes).fold(0, |value, i| {
                value | u64::from(self.byte(warp, lane, at.wrapping_add(i)).unwrap_or(0)) << (8 * i)
            });
            (at, count) = (at.wrapping_add(bytes), count + 1);
            value
        };
        let mut text = String::new();
        let mut rest = format.chars().peekable();
        while let Some(c) = rest.next().filter(|_| text.len() < LONGEST) {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut spec = Conversion::default();
            while let Some(flag) = rest.next_if(|c| "-+ #0".contains(*c)) {
                spec.left |= flag == '-';
                spec.sign |= flag == '+';
                spec.zeros |= flag == '0';
            }
            let mut number = |rest: &mut std::iter::Peekable<std::str::Chars>| {
                if rest.next_if_eq(&'*').is_some() {
                    return (next(4) as u32 as usize).min(LONGEST);
                }
                let mut n = 0;
                while let Some(digit) = rest.next_if(char::is_ascii_digit) {
                    n = (10 * n + digit as usize - '0' as usize).min(LONGEST);
                }
                n
            };
            spec.width = number(&mut rest);
            spec.precision = rest.next_if_eq(&'.').map(|_| number(&mut rest));
            while let Some(size) = rest.next_if(|c| "hlLjzt".contains(*c)) {
                spec.long |= "ljzt".contains(size);
            }
            let Some(kind) = rest.next() else { break };
            let word = |spec: &Conversion, next: &mut dyn FnMut(u64) -> u64| {
                if spec.long { next(8) } else { next(4) }
            };
            match kind {
                '%' => text.push('%'),
                'd' | 'i' => {
                    let value = word(&spec, &mut next);
                    let value = if spec.long { value as i64 } else { i64::from(value as i32) };
                    spec.number(&mut text, value < 0, value.unsigned_abs().to_string());
                }
                'u' => spec.number(&mut text, false, word(&spec, &mut next).to_string()),
                'x' => spec.number(&mut text, false, format!("{:x}", word(&spec, &mut next))),
                'X' => spec.number(&mut text, false, format!("{:X}", word(&spec, &mut next))),
                'o' => spec.number(&mut text, false, format!("{:o}", word(&spec, &mut next))),
                'p' => spec.pad(&mut text, &format!("{:#x}", next(8))),
                'c' => spec.pad(&mut text, &char::from(next(4) as u8).to_string()),
                's' => {
                    let string = self.text(warp, lane, next(8));
                    let shown = spec.precision.unwrap_or(LONGEST);
                    spec.pad(&mut text, &string.chars().take(shown).collect::<String>());
                }
                'f' | 'F' | 'e' | 'E' | 'g' | 'G' | 'a' | 'A' => {
                    let value = f64::from_bits(next(8));
                    spec.number(&mut text, value.is_sign_negative(), spec.float(kind, value.abs()));
                }
                other => text.extend(['%', other]),
            }
        }
        (text, count)
    }
}

/// Offset of the frame of the running function in local memory.
fn frame(warp: &Warp, pointer: crate::decode::Slot, lane: usize) -> usize {
    (warp.registers.lane(pointer, lane) - LOCAL_BASE) as usize
}

/// A conversion of `printf`, without its letter.
#[derive(Clone, Copy, Debug, Default)]
struct Conversion {
    left: bool,
    sign: bool,
    zeros: bool,
    long: bool,
    width: usize,
    precision: Option<usize>,
}

impl Conversion {
    fn pad(&self, text: &mut String, value: &str) {
        let width = self.width;
        *text += &if self.left { format!("{value:<width$}") } else { format!("{value:>width$}") };
    }

    fn number(&self, text: &mut String, negative: bool, digits: String) {
        let sign = if negative {
            "-"
        } else if self.sign {
            "+"
        } else {
            ""
        };
        if self.zeros && !self.left {
            let width = self.width.saturating_sub(sign.len());
            *text += &format!("{sign}{digits:0>width$}");
        } else {
            self.pad(text, &format!("{sign}{digits}"));
        }
    }

    fn float(&self, kind: char, value: f64) -> String {
        let precision = self.precision.unwrap_or(6);
        if !value.is_finite() {
            return if value.is_nan() { "nan".into() } else { "inf".into() };
        }
        match kind {
            'f' | 'F' => format!("{value:.precision$}"),
            'e' | 'E' => exponential(value, precision),
            // Hexadecimal floats are shown in full, in decimal.
            'a' | 'A' => format!("{value:e}"),
            _ => general(value, precision.max(1)),
        }
    }
}

/// `%e`: at least two digits of the exponent.
fn exponential(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// `%g`: the shorter of `%e` and `%f` with this many significant digits, without trailing zeros.
fn general(value: f64, digits: usize) -> String {
    let scientific = exponential(value, digits - 1);
    let exponent: i32 = scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let trimmed = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= digits as i32 {
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{exponent}", trimmed(mantissa));
    }
    trimmed(&format!("{value:.*}", (digits as i32 - 1 - exponent).max(0) as usize))
}

#[cfg(test)]
mod tests {
    use super::Conversion;

    #[test]
    fn floats_as_c_prints_them() {
        let of =
            |kind, value, precision| Conversion { precision, ..Conversion::default() }.float(kind, value);
        assert_eq!(of('f', 1.5, None), "1.500000");
        assert_eq!(of('e', 12345.678, Some(2)), "1.23e+04");
        assert_eq!(of('e', 0.00012, None), "1.200000e-04");
        assert_eq!(of('g', 0.0001, None), "0.0001");
        assert_eq!(of('g', 1e-5, None), "1e-05");
        assert_eq!(of('g', 100_000.0, None), "100000");
        assert_eq!(of('g', 1e6, None), "1e+06");
        assert_eq!(of('g', 0.0, None), "0");
    }

    #[test]
    fn widths_and_signs() {
        let with = |spec: Conversion, negative| {
            let mut text = String::new();
            spec.number(&mut text, negative, "42".into());
            text
        };
        assert_eq!(with(Conversion { width: 5, ..Conversion::default() }, true), "  -42");
        assert_eq!(with(Conversion { width: 5, zeros: true, ..Conversion::default() }, true), "-0042");
        assert_eq!(
            with(Conversion { width: 5, left: true, sign: true, ..Conversion::default() }, false),
            "+42  "
        );
    }
}
