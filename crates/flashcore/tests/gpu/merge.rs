//! Merges of results over different keys.

use super::*;

const EXTENTS: [usize; 4] = [2, 3, 4, 16];
const VALUES: usize = 2 * 3 * 4 * 16;
const ROWS: usize = 2 * 3 * 4;

/// A GPU merges results as host memory does: at addresses that are multiples of 16 bytes and at others, of
/// one part and of more. What the kernel does not take is refused by name.
#[allow(unsafe_code, reason = "the raw call takes addresses")]
pub fn merge() {
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let on_gpu = raw::Queue::Stream { gpu: &gpu, handle: stream.raw() };
    let parts: Vec<(Vec<f16>, Vec<f32>)> = (0..3)
        .map(|part| {
            let lse =
                |row| if row % 3 == part { f32::NEG_INFINITY } else { ((row * 5 + part) % 7) as f32 / 2.0 };
            (ramp(VALUES, 3 + 2 * part), (0..ROWS).map(lse).collect())
        })
        .collect();
    for (count, shift) in [(3, 0), (3, 4), (1, 0)] {
        let (out, lse) = (vec![f16::ZERO; VALUES], vec![0f32; ROWS]);
        let given: Vec<_> = parts.iter().map(|(x, lse)| [x.as_ptr() as u64, lse.as_ptr() as u64]).collect();
        let to = [out.as_ptr() as u64, lse.as_ptr() as u64];
        let of = |parts, to| raw::Merge { dtype: DType::F16, extents: EXTENTS, parts, to };
        // SAFETY: the slices have the extents.
        unsafe { raw::merge_states(raw::Queue::host(), &of(&given[..count], to)) }.unwrap();

        let buffer = |bytes: &[u8]| {
            let mut buffer = Buffer::new(gpu.context(), bytes.len() + shift).unwrap();
            buffer.upload(&[&vec![0; shift][..], bytes].concat()).unwrap();
            buffer
        };
        let held: Vec<[Buffer; 2]> =
            parts[..count].iter().map(|(x, lse)| [buffer(bytes_of(x)), buffer(bytes_of(lse))]).collect();
        let merged = [buffer(&[0xff; 2 * VALUES]), buffer(&[0xff; 4 * ROWS])];
        let address = |buffer: &Buffer| buffer.slice().address() + shift as u64;
        let pair = |pair: &[Buffer; 2]| [address(&pair[0]), address(&pair[1])];
        let given: Vec<_> = held.iter().map(pair).collect();
        // SAFETY: as above, in device memory.
        unsafe { raw::merge_states(on_gpu, &of(&given, pair(&merged))) }.unwrap();
        stream.synchronize().unwrap();
        let [found, found_lse] = merged.map(|buffer| {
            let mut bytes = vec![0; buffer.bytes()];
            buffer.download(&mut bytes).unwrap();
            bytes.split_off(shift)
        });
        let found: Vec<f16> = found.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        let found_lse: Vec<f32> =
            found_lse.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        close(&found, &out.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>());
        close_lse(&found_lse, &lse.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        assert!(count > 1 || found_lse == parts[0].1, "one part stays as it is");
    }
    let refused = |parts: usize, dtype: DType, words: &str| {
        let given = vec![[16, 16]; parts];
        let merge = raw::Merge { dtype, extents: EXTENTS, parts: &given, to: [16, 16] };
        // SAFETY: the call is refused.
        let error = unsafe { raw::merge_states(on_gpu, &merge) }.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(0, DType::F16, "number of parts");
    refused(17, DType::F16, "parts");
    refused(2, DType::E4m3, "e4m3");
}
