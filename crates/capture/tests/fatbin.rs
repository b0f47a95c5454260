//! The PTX of fat binaries that `fatbinary` of CUDA 13.5 wrote from `fatbin/twice.ptx`, for sm_80 and for
//! sm_90, in each of its modes of compression.

use flashcore_capture::fatbin::{Code, ImageError, codes, ptx};

const TEXT: &str = include_str!("fatbin/twice.ptx");
const BOTH: [(&str, &[u8]); 3] = [
    ("plain", include_bytes!("fatbin/plain.fatbin")),
    ("lz4", include_bytes!("fatbin/lz4.fatbin")),
    ("zstd", include_bytes!("fatbin/zstd.fatbin")),
];
const CUBIN: &[u8] = include_bytes!("fatbin/cubin.fatbin");

/// The text as `fatbinary` stores it: without empty lines and spaces that mean nothing.
fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[test]
fn the_text_for_the_device_is_found_however_it_is_compressed() {
    for (mode, image) in BOTH {
        let newer = TEXT.replace("sm_80", "sm_90");
        for (capability, text) in [(80, TEXT), (89, TEXT), (90, &newer), (0, &newer)] {
            let found = ptx(image, capability).unwrap();
            assert_eq!(words(&found), words(text), "{mode} on sm_{capability}");
        }
        let error = ptx(image, 75).unwrap_err().to_string();
        assert_eq!(error, "its module has PTX for sm_80, sm_90 only, which a device of sm_75 cannot run");
    }
}

#[test]
fn text_and_machine_code_are_told_apart() {
    assert_eq!(ptx(format!("{TEXT}\0rest").as_bytes(), 90).unwrap(), TEXT);
    assert_eq!(codes(CUBIN), Ok(vec![Code::Cubin(80)]));
    let error = ptx(CUBIN, 80).unwrap_err().to_string();
    assert_eq!(error, "its module is machine code (a cubin) for sm_80 without PTX");
    // The headers that ptxas of CUDA 12.9 and of 13.5 write for sm_90a and for sm_80.
    let mut header = [0; 64];
    for (version, flags, arch) in [(7, 0x005a_0d5a_u32, 90), (8, 0x0600_5004, 80)] {
        header[..4].copy_from_slice(b"\x7fELF");
        header[8] = version;
        header[48..52].copy_from_slice(&flags.to_le_bytes());
        assert_eq!(codes(&header), Ok(vec![Code::Cubin(arch)]));
    }
    assert_eq!(ptx(b"no module", 80), Err(ImageError::Unknown));
}

#[test]
fn damaged_fat_binaries_are_refused() {
    for (mode, image) in BOTH {
        for length in 8..image.len() {
            // Every cut ends between two entries or is an error. None of them panics.
            if let Ok(found) = codes(&image[..length]) {
                assert!(found.len() < 2, "{mode} of {length} bytes");
            }
        }
    }
    let mut image = BOTH[1].1.to_vec();
    image[16 + 41] = 0x40;
    assert_eq!(codes(&image), Err(ImageError::Compression { flags: 0x4011 }));
    let mut image = BOTH[2].1.to_vec();
    image[0x60] ^= 0xff;
    assert!(matches!(codes(&image), Err(ImageError::Damaged { .. })));
}
