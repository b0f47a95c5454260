//! The PTX in the image of a module: text, a cubin, or a fat binary, whose entries may be compressed.
//!
//! NVIDIA documents no layout of fat binaries. This one is that of `fatbinary` of CUDA 13.5; the files in
//! `tests/fatbin` are its outputs.

use std::io::Read;

/// The first bytes of a fat binary.
const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// Bits of an entry's flags.
const LZ4: u64 = 1 << 13;
const ZSTD: u64 = 1 << 15;
/// The largest text of an entry, in bytes.
const LARGEST: u64 = 1 << 28;

/// The code that an image has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Code {
    /// The architecture (80 for sm_80; 0 where the image does not tell it) and the text.
    Ptx(u32, String),
    /// The architecture of machine code.
    Cubin(u32),
}

/// Why an image has no PTX that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("its module is machine code (a cubin) for {archs} without PTX")]
    NoPtx {
        /// The architectures, printed.
        archs: String,
    },
    #[error("its module has PTX for {archs} only, which a device of sm_{capability} cannot run")]
    Newer {
        /// The architectures, printed.
        archs: String,
        capability: u32,
    },
    #[error("its module is a fat binary that ends inside an entry, at byte {at}")]
    Truncated {
        /// The start of the entry.
        at: usize,
    },
    #[error("the PTX in its fat binary is compressed in a way that is not known (flags {flags:#x})")]
    Compression {
        /// The flags of the entry.
        flags: u64,
    },
    #[error("the PTX in its fat binary does not decompress: {reason}")]
    Damaged {
        /// The decoder's message.
        reason: String,
    },
    #[error("its module is neither PTX nor a cubin nor a fat binary")]
    Unknown,
}

/// The PTX of an image that a device of this compute capability (times 10; 0 for any) runs: that for the
/// newest architecture that the device has.
///
/// # Errors
/// When there is none.
pub fn ptx(image: &[u8], capability: u32) -> Result<String, ImageError> {
    let all = codes(image)?;
    let listed = |archs: &mut dyn Iterator<Item = u32>| {
        let mut archs: Vec<u32> = archs.collect();
        archs.sort_unstable();
        archs.dedup();
        archs.iter().map(|arch| format!("sm_{arch}")).collect::<Vec<_>>().join(", ")
    };
    let texts = || {
        all.iter()
            .filter_map(|code| if let Code::Ptx(arch, text) = code { Some((*arch, text)) } else { None })
    };
    let fitting = texts().filter(|(arch, _)| capability == 0 || *arch <= capability);
    match fitting.max_by_key(|(arch, _)| *arch) {
        Some((_, text)) => Ok(text.clone()),
        None if texts().next().is_some() => {
            Err(ImageError::Newer { archs: listed(&mut texts().map(|(arch, _)| arch)), capability })
        }
        None => {
            let cubin = |code: &Code| if let Code::Cubin(arch) = code { Some(*arch) } else { None };
            Err(ImageError::NoPtx { archs: listed(&mut all.iter().filter_map(cubin)) })
        }
    }
}

/// The codes of an image, in its order.
///
/// # Errors
/// When the image is unknown or damaged.
pub fn codes(image: &[u8]) -> Result<Vec<Code>, ImageError> {
    if image.starts_with(&MAGIC) {
        return entries(image);
    }
    if image.starts_with(b"\x7fELF") {
        return Ok(vec![Code::Cubin(arch_of_cubin(image))]);
    }
    let text = image.split(|&byte| byte == 0).next().unwrap_or_default();
    match std::str::from_utf8(text) {
        Ok(text) if text.contains(".version") => Ok(vec![Code::Ptx(0, text.to_owned())]),
        _ => Err(ImageError::Unknown),
    }
}

/// The architecture of a cubin: the lowest byte of the flags in its ELF header; from CUDA 13 on the second
/// one.
fn arch_of_cubin(image: &[u8]) -> u32 {
    let flags = number::<4>(image, 48).unwrap_or(0) as u32;
    let is_new = image.get(8).is_some_and(|version| *version >= 8);
    if is_new { flags >> 8 & 0xff } else { flags & 0xff }
}

/// A little-endian number of `N` bytes.
fn number<const N: usize>(image: &[u8], at: usize) -> Option<u64> {
    let bytes = image.get(at..at.checked_add(N)?)?;
    Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn entries(image: &[u8]) -> Result<Vec<Code>, ImageError> {
    let mut found = Vec::new();
    let mut at = number::<2>(image, 6).ok_or(ImageError::Truncated { at: 0 })? as usize;
    let size = number::<8>(image, 8).ok_or(ImageError::Truncated { at: 0 })? as usize;
    let end = at.saturating_add(size).min(image.len());
    while at < end {
        let truncated = ImageError::Truncated { at };
        let field = |offset: usize| number::<4>(image, at + offset);
        let read = || {
            Some((number::<2>(image, at)?, field(4)?, number::<8>(image, at + 8)?, field(16)?, field(28)?))
        };
        let (kind, header, padded, payload, arch) = read().ok_or(truncated.clone())?;
        let flags = number::<8>(image, at + 40).ok_or(truncated.clone())?;
        let length = number::<8>(image, at + 56).ok_or(truncated.clone())?;
        let start = at.saturating_add(header as usize);
        let next = start.saturating_add(padded as usize);
        let stored = if payload == 0 { next } else { start.saturating_add(payload as usize) };
        let data = image.get(start..stored).filter(|_| next > at && next <= image.len()).ok_or(truncated)?;
        match kind {
            1 => found.push(Code::Ptx(arch as u32, text(data, flags, length)?)),
            2 => found.push(Code::Cubin(arch as u32)),
            // Other kinds, such as options and LTO intermediates, are no code that runs.
            _ => {}
        }
        at = next;
    }
    Ok(found)
}

/// The text of an entry; `length` are its bytes, if it is compressed.
fn text(data: &[u8], flags: u64, length: u64) -> Result<String, ImageError> {
    let damaged = |reason: String| ImageError::Damaged { reason };
    if length > LARGEST {
        return Err(damaged(format!("the text has {length} bytes, more than {LARGEST}")));
    }
    let bytes = if flags & LZ4 != 0 {
        lz4_flex::block::decompress(data, length as usize).map_err(|error| damaged(error.to_string()))?
    } else if flags & ZSTD != 0 {
        let decoder =
            ruzstd::decoding::StreamingDecoder::new(data).map_err(|error| damaged(error.to_string()))?;
        let mut bytes = Vec::new();
        decoder.take(length).read_to_end(&mut bytes).map_err(|error| damaged(error.to_string()))?;
        bytes
    } else if length != 0 {
        return Err(ImageError::Compression { flags });
    } else {
        data.to_vec()
    };
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8(bytes[..end].to_vec()).map_err(|error| damaged(error.to_string()))
}
