//! Calls that are not valid: each is refused by a code and a text, and nothing is written but the text.
#![allow(unsafe_code, reason = "calls of a C interface")]

use std::ffi::{CStr, c_char};
use std::ptr;

use flashcore_c::{
    __tvm_ffi_prepare, CCall, COperand, TvmAny, flashcore_attention, flashcore_prepare,
    flashcore_workspace_size,
};
use proptest::prelude::*;

const F32: u32 = 0x12002;
const I32: u32 = 0x12000;

/// Makes something invalid.
type Change<T> = fn(&mut T);

fn operand(operand: u32, address: *const f32) -> COperand {
    let (shape, strides) = ([1, 1, 2, 8], [16, 16, 8, 1]);
    COperand { operand, dtype: F32, address: address as u64, dimensions: 4, shape, strides }
}

fn call(operands: &[COperand]) -> CCall {
    CCall {
        size: size_of::<CCall>() as u64,
        operands: operands.as_ptr(),
        operand_count: operands.len() as u64,
        pass: 0,
        flags: 0,
        device_type: 1,
        device: 0,
        stream: 0,
        threads: 1,
        keys_before: 0,
        keys_after: 0,
        scale: 0.0,
        softcap: 0.0,
        score: ptr::null(),
        mask: ptr::null(),
        floats: ptr::null(),
        float_count: 0,
        ints: ptr::null(),
        int_count: 0,
        longest_q: 0,
        longest_k: 0,
        scale_rows: [0; 3],
        reserved: 0,
        error: ptr::null_mut(),
        error_size: 0,
    }
}

/// The code and the text of a function on a call.
fn told(mut call: CCall, function: unsafe extern "C" fn(*const CCall) -> i32) -> (i32, String) {
    let mut text = [0x7f as c_char; 256];
    (call.error, call.error_size) = (text.as_mut_ptr(), 255);
    // SAFETY: the call is a `flashcore_call`, whose arrays outlive it.
    let code = unsafe { function(&call) };
    assert_eq!(text[255], 0x7f, "a byte after the buffer was written");
    if code == 0 {
        return (0, String::new());
    }
    assert_ne!(text[0], 0x7f, "no text for {call:?}");
    // SAFETY: a function that fails ends its text with a NUL.
    (code, unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned())
}

/// Four operands in host memory, which live as long as the process.
fn operands() -> [COperand; 4] {
    let x = Box::leak(vec![0.5f32; 64].into_boxed_slice()).as_mut_ptr();
    // SAFETY: the parts lie in the 64 elements.
    [0, 1, 2, 3].map(|i| operand(i, unsafe { x.add(16 * i as usize) }))
}

#[test]
fn a_call_computes_and_its_workspace_is_known() {
    let operands = operands();
    assert_eq!(told(call(&operands), flashcore_prepare), (0, String::new()));
    assert_eq!(told(call(&operands), flashcore_attention), (0, String::new()));
    let mut bytes = u64::MAX;
    // SAFETY: as above.
    assert_eq!(unsafe { flashcore_workspace_size(&call(&operands), &mut bytes) }, 0);
    assert_eq!(bytes, 0, "the host needs none");
    // SAFETY: null is refused.
    assert_eq!(unsafe { flashcore_workspace_size(&call(&operands), ptr::null_mut()) }, 1);
}

#[test]
fn each_fault_is_named() {
    let good = operands();
    let faults: [(&str, Change<CCall>); 11] = [
        ("invalid value '24' for the size of call: expected sizeof(flashcore_call), 176 or more", |c| {
            c.size = 24
        }),
        ("invalid value '0x80' for the flags of call: expected a sum of the flags", |c| c.flags = 0x80),
        ("invalid value '7' for the field 'reserved' of call: expected 0", |c| c.reserved = 7),
        ("invalid value '3' for the field 'pass' of call: expected FLASHCORE_FORWARD", |c| c.pass = 3),
        ("invalid value '0' for the field 'device_type' of call", |c| c.device_type = 0),
        ("invalid value '-1' for the field 'keys_after' of call: expected 0 or more", |c| {
            (c.flags, c.keys_after) = (2, -1);
        }),
        ("invalid value '4' for the field 'keys_before' of call: expected 0 without", |c| c.keys_before = 4),
        ("invalid value '-2' for the field 'longest_q' of call", |c| c.longest_q = -2),
        ("invalid value '0x0' for the address of operands: expected the address of 4", |c| {
            c.operands = ptr::null();
        }),
        ("invalid value '65' for the number of elements of operands: expected at most 64", |c| {
            c.operand_count = 65;
        }),
        ("invalid mask program: ", |c| c.mask = c"score +".as_ptr()),
    ];
    for (expected, change) in faults {
        let mut changed = call(&good);
        change(&mut changed);
        let (code, text) = told(changed, flashcore_attention);
        assert!(code == 1 && text.starts_with(expected), "{code}: {text}");
    }
    let entries: [(&str, Change<COperand>); 6] = [
        ("invalid value '99' for the number of an operand of operands", |o| o.operand = 99),
        ("q is given twice", |o| o.operand = 0),
        ("invalid value '0x11008' for the dtype of k", |o| o.dtype = 0x11008),
        ("invalid value '5' for the number of dimensions of k: expected at most 4", |o| o.dimensions = 5),
        ("invalid value '-8' for the shape of k: expected 0 or more", |o| o.shape[3] = -8),
        ("invalid value '0x2' for the address of k: expected a multiple of 4", |o| o.address = 2),
    ];
    for (expected, change) in entries {
        let mut changed = good;
        change(&mut changed[1]);
        let (code, text) = told(call(&changed), flashcore_attention);
        assert!(code == 1 && text.starts_with(expected), "{code}: {text}");
    }
    let more: [(&str, u32, &[u32]); 4] = [
        ("v_new is missing", 0, &[21]),
        ("rotary_cos is missing", 32, &[21, 22]),
        ("seqused_k is missing", 0, &[21, 22]),
        ("invalid value '0x12002' for the dtype of slot_mapping: expected 0x12000 (i32)", 0, &[27]),
    ];
    for (expected, flags, appended) in more {
        let all: Vec<COperand> =
            good.iter().copied().chain(appended.iter().map(|&number| operand(number, ptr::null()))).collect();
        let mut changed = call(&all);
        changed.flags = flags;
        let (code, text) = told(changed, flashcore_attention);
        assert!(code == 1 && text.starts_with(expected), "{code}: {text}");
    }
    // A call that states fewer fields has no buffer.
    let mut smallest = call(&good);
    smallest.size = 8;
    // SAFETY: null is refused, and so is a call without fields.
    assert_eq!(unsafe { [flashcore_attention(ptr::null()), flashcore_attention(&smallest)] }, [1, 1]);
}

#[test]
fn fields_of_a_newer_header_must_be_zero() {
    #[repr(C)]
    struct Newer {
        call: CCall,
        field: u64,
    }
    let good = operands();
    for (field, code) in [(0, 0), (1, 1)] {
        let mut newer = Newer { call: call(&good), field };
        newer.call.size = size_of::<Newer>() as u64;
        // SAFETY: the call has so many bytes.
        assert_eq!(unsafe { flashcore_attention(&newer.call) }, code);
    }
}

#[test]
fn a_text_is_cut_between_characters() {
    let good = operands();
    for bytes in 0..40 {
        let mut text = [0x7f as c_char; 40];
        let mut call = call(&good);
        (call.softcap, call.mask) = (-1.0, c"\xc2\xb5\xc2\xb5\xc2\xb5".as_ptr());
        (call.error, call.error_size) = (text.as_mut_ptr(), bytes);
        // SAFETY: the buffer has at least the stated bytes.
        assert_eq!(unsafe { flashcore_prepare(&call) }, 1);
        let end = text.iter().position(|&byte| byte == 0x7f).unwrap();
        assert!(end as u64 <= bytes && (bytes == 0 || text[end - 1] == 0), "{bytes}: {end}");
        let text: Vec<u8> = text[..end.saturating_sub(1)].iter().map(|&byte| byte as u8).collect();
        assert!(std::str::from_utf8(&text).is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Every number of a call and of its operands may be anything. The memory of operands is not touched.
    #[test]
    fn no_call_is_a_defect(
        numbers in any::<([u32; 2], [i64; 4], [f32; 2], [u32; 3], u64)>(),
        small in (0u32..4, 0u32..64, prop::collection::vec(0u32..29, 3..9)),
        entries in prop::collection::vec(
            (
                prop_oneof![Just(F32), Just(0x11002), Just(I32), any::<u32>()],
                any::<u64>(),
                prop_oneof![9 => Just(4u64), 1 => any::<u64>()],
                prop::array::uniform4(prop_oneof![6 => 0i64..9, 1 => any::<i64>()]),
                prop::array::uniform4(prop_oneof![6 => -64i64..65, 1 => any::<i64>()]),
            ),
            8,
        ),
        wild in any::<[bool; 4]>(),
    ) {
        let (pass, flags, kinds) = small;
        let kinds = kinds.iter().enumerate().map(|(i, &kind)| if i < 4 { i as u32 } else { kind });
        let operands: Vec<COperand> = kinds
            .zip(entries)
            .map(|(operand, (dtype, address, dimensions, shape, strides))| {
                COperand { operand, dtype, address, dimensions, shape, strides }
            })
            .collect();
        let mut call = call(&operands);
        (call.pass, call.flags) = (pass, flags);
        let ([a, b], [before, after, longest_q, longest_k], [scale, softcap], scale_rows, threads) = numbers;
        if wild[0] {
            (call.pass, call.flags) = (a, b);
        }
        if wild[1] {
            (call.keys_before, call.keys_after) = (before, after);
            (call.longest_q, call.longest_k) = (longest_q, longest_k);
        }
        if wild[2] {
            (call.scale, call.softcap, call.threads) = (scale, softcap, threads);
        }
        if wild[3] {
            call.scale_rows = scale_rows;
        }
        let (code, text) = told(call, flashcore_prepare);
        prop_assert!((0..=3).contains(&code), "{code}: {text}");
        prop_assert_eq!(code == 0, text.is_empty());
    }
}

/// A value of TVM-FFI: the index of its type, the length of a small string, and a number or an address.
fn value(type_index: i32, length: u32, value: u64) -> TvmAny {
    TvmAny { type_index, length, value }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any text is a call or an error of TVM-FFI, and no tensor is read that is none.
    #[test]
    fn no_text_is_a_defect(
        text in prop_oneof![
            "[a-z_ ;=,.0-9]{0,40}",
            "(q|k|v|out|lse|_|table_1| ){0,9}(; ?(causal|scale=|floats=1,2|score=s|mask=|backward|x=\\PC))*",
            any::<String>(),
        ],
        types in prop::collection::vec(-2i32..80, 0..6),
    ) {
        let text = text.replace('\0', "");
        let text = std::ffi::CString::new(text).unwrap();
        let is_none = |index: &i32| !matches!(index, 7 | 8 | 65 | 70);
        let others = types.into_iter().filter(is_none).map(|index| value(index, 3, 0));
        let args: Vec<TvmAny> = std::iter::once(value(8, 0, text.as_ptr() as u64)).chain(others).collect();
        for count in [args.len() as i32, 0, -1] {
            let mut result = value(0, 0, 0);
            // SAFETY: the values are a text and numbers.
            let code = unsafe {
                __tvm_ffi_prepare(ptr::null_mut(), args.as_ptr(), count, &mut result)
            };
            prop_assert_eq!(code, -1, "a call without tensors computes nothing");
        }
    }
}
