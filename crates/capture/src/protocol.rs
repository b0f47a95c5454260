//! Names and limits that the command and the library in the other program share.

/// The folder for records.
pub const FOLDER: &str = "FLASHCORE_CAPTURE_FOLDER";
/// A part of the name of the kernels whose launches are recorded; without it launches are only counted.
pub const KERNEL: &str = "FLASHCORE_CAPTURE_KERNEL";
/// The numbers of the launches, from 1, separated by commas.
pub const AT: &str = "FLASHCORE_CAPTURE_AT";
/// The maximum number of bytes of the memory of one launch.
pub const LIMIT: &str = "FLASHCORE_CAPTURE_LIMIT";
/// If set, the memory after the launch is recorded, too.
pub const AFTER: &str = "FLASHCORE_CAPTURE_AFTER";

/// The largest memory, in bytes, that is searched for addresses of other memory. Tables of pointers are
/// small.
pub const TABLE: usize = 1 << 20;

/// The length of the header of the `.npy` files that the library writes. All have this length, so that a
/// reader can replace a header by that of another element type.
pub const HEADER: usize = 128;

/// The header of a `.npy` file with one dimension.
pub fn header(dtype: &str, elements: usize) -> Vec<u8> {
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(((HEADER - 10) as u16).to_le_bytes());
    header.extend(
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({elements},), }}").into_bytes(),
    );
    header.resize(HEADER - 1, b' ');
    header.push(b'\n');
    header
}
