//! The image from which a module was loaded.

use std::sync::Arc;

/// A fat binary, and the descriptor by which the CUDA runtime refers to one.
const FAT: u32 = 0xba55_ed50;
const DESCRIPTOR: u32 = 0x4662_43b1;
/// The longest text of a module, in bytes.
const LONGEST: usize = 1 << 30;

/// The bytes of a module.
#[derive(Clone, Debug)]
pub enum Image {
    /// A copy: the program may free its own.
    Copied(Arc<[u8]>),
    /// A fat binary in a loaded library. Such images are large, and stay where they are.
    Static(&'static [u8]),
    /// Why there is none.
    Missing(String),
}

impl Image {
    pub fn of_file(path: &str) -> Image {
        match std::fs::read(path) {
            Ok(bytes) => Image::Copied(bytes.into()),
            Err(error) => Image::Missing(format!("{path}: {error}")),
        }
    }

    /// The image at an address.
    ///
    /// # Safety
    /// The driver must have loaded the image from there.
    pub unsafe fn at(image: *const u8) -> Image {
        // SAFETY: an image that the driver has accepted has at least four bytes.
        let word = unsafe { image.cast::<u32>().read_unaligned() };
        if word == DESCRIPTOR {
            // SAFETY: the descriptor has the address of the fat binary after two words. Both are in the data
            // of a library that registered them for its life.
            return unsafe {
                let fat = image.add(8).cast::<*const u8>().read_unaligned();
                Image::Static(std::slice::from_raw_parts(fat, size(fat)))
            };
        }
        // SAFETY: the driver has read these bytes.
        Image::Copied(unsafe { std::slice::from_raw_parts(image, size(image)) }.into())
    }

    pub fn bytes(&self) -> Result<&[u8], String> {
        match self {
            Image::Copied(bytes) => Ok(bytes),
            Image::Static(bytes) => Ok(bytes),
            Image::Missing(why) => Err(format!("the module's image is not known: {why}")),
        }
    }
}

/// The number of bytes of an image, by its own header.
///
/// # Safety
/// As for [`Image::at`].
unsafe fn size(image: *const u8) -> usize {
    // SAFETY: the fields lie in the header of an image of this kind.
    let number = |at: usize, bytes: usize| unsafe {
        (0..bytes).rev().fold(0usize, |value, byte| value << 8 | usize::from(*image.add(at + byte)))
    };
    if number(0, 4) == FAT as usize {
        return number(6, 2) + number(8, 8);
    }
    if number(0, 4) == u32::from_le_bytes(*b"\x7fELF") as usize {
        let (programs, sections) = (number(32, 8), number(40, 8));
        let ends = [programs + number(54, 2) * number(56, 2), sections + number(58, 2) * number(60, 2)];
        // A section without bytes in the file has the type 8.
        let section = |index: usize| sections + index * number(58, 2);
        let in_file = (0..number(60, 2)).map(section).filter(|&at| number(at + 4, 4) != 8);
        let sections = in_file.map(|at| number(at + 24, 8) + number(at + 32, 8));
        // The header alone has 64 bytes.
        return sections.chain(ends).fold(64, usize::max);
    }
    // SAFETY: a module in text ends with NUL.
    (0..LONGEST).find(|&at| unsafe { *image.add(at) } == 0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_the_bytes_that_its_header_states() {
        let fat = include_bytes!("../../tests/fatbin/zstd.fatbin");
        let mut longer = fat.to_vec();
        longer.extend([7; 100]);
        let descriptor = [u64::from(DESCRIPTOR) | 1 << 32, longer.as_ptr() as u64, 0];
        let text = b".version 8.0\0rest";
        // SAFETY: images as a program passes them.
        unsafe {
            assert_eq!(Image::at(longer.as_ptr()).bytes().unwrap(), fat);
            assert_eq!(Image::at(descriptor.as_ptr().cast()).bytes().unwrap(), fat);
            assert_eq!(Image::at(text.as_ptr()).bytes().unwrap(), b".version 8.0");
        }
        let mut elf = vec![0u8; 500];
        elf[..4].copy_from_slice(b"\x7fELF");
        // Two sections of 64 bytes from byte 64 on; the second is 80 bytes from byte 300 on.
        (elf[40], elf[58], elf[60]) = (64, 64, 2);
        elf[128 + 24..128 + 26].copy_from_slice(&300u16.to_le_bytes());
        elf[128 + 32] = 80;
        // SAFETY: as above.
        assert_eq!(unsafe { Image::at(elf.as_ptr()) }.bytes().unwrap().len(), 380);
        assert!(Image::of_file("/nonexistent").bytes().unwrap_err().contains("/nonexistent: "));
    }
}
