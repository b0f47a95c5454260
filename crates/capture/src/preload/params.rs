//! The bytes of a launch's parameters.

use std::ffi::c_void;

use crate::driver;
use crate::launch::Launch;
use crate::state::CapturedFunction;

/// Offset and size of each parameter in bytes.
type Layout = Vec<(usize, usize)>;

/// The bytes of each parameter.
///
/// # Safety
/// The launch must be one that the program makes of this function.
pub unsafe fn bytes(function: &CapturedFunction, launch: &Launch) -> Result<Vec<Vec<u8>>, String> {
    let layout = layout(function, launch)?;
    // SAFETY: as the caller guarantees; an array of parameters has an address for each.
    unsafe {
        let packed = packed(launch.extra);
        if packed.is_null() && launch.params.is_null() && !layout.is_empty() {
            return Err("the launch has no parameters, but its kernel has".to_owned());
        }
        let part = |(index, &(offset, size)): (usize, &(usize, usize))| {
            let from = if packed.is_null() { *launch.params.add(index) } else { packed.add(offset) };
            std::slice::from_raw_parts(from, size).to_vec()
        };
        Ok(layout.iter().enumerate().map(part).collect())
    }
}

/// The parameters in one piece, if a launch passes them so: `extra` lists keys and values.
unsafe fn packed(extra: *const *const c_void) -> *const u8 {
    // CU_LAUNCH_PARAM_END and CU_LAUNCH_PARAM_BUFFER_POINTER.
    const END: usize = 0;
    const POINTER: usize = 1;
    if extra.is_null() {
        return std::ptr::null();
    }
    // SAFETY: the list ends with the key END.
    unsafe {
        let mut at = extra;
        while *at as usize != END {
            if *at as usize == POINTER {
                return (*at.add(1)).cast();
            }
            at = at.add(2);
        }
    }
    std::ptr::null()
}

/// As the driver tells it, or, of drivers before CUDA 12.4, as the text of the module does.
fn layout(function: &CapturedFunction, launch: &Launch) -> Result<Layout, String> {
    let mut layout = Layout::new();
    let end = loop {
        let (mut offset, mut size) = (0, 0);
        let (handle, index) = (launch.function, layout.len());
        // SAFETY: the addresses are those of variables. A number beyond the last parameter is an error.
        let told = unsafe {
            if function.is_kernel {
                driver::kernel_parameter(handle, index, &mut offset, &mut size)
            } else {
                driver::function_parameter(handle, index, &mut offset, &mut size)
            }
        };
        match told {
            Ok(()) => layout.push((offset, size)),
            Err(error) => break error,
        }
    };
    if !end.starts_with("the driver has no") {
        return Ok(layout);
    }
    let text = function.image.bytes().ok().and_then(|image| std::str::from_utf8(image).ok());
    text.and_then(|text| of_text(text, &function.name)).ok_or_else(|| {
        format!("{end} (CUDA 12.4 or newer), and the module is no text that states the parameters")
    })
}

/// The parameters of an entry of PTX.
fn of_text(text: &str, name: &str) -> Option<Layout> {
    let is_name = |rest: &&str| {
        rest.trim_start()
            .strip_prefix(name)
            .is_some_and(|rest| rest.trim_start().starts_with(['(', '{', '.']))
    };
    let entry = text.split(".entry").skip(1).find(is_name)?.trim_start().strip_prefix(name)?.trim_start();
    let Some(list) = entry.strip_prefix('(') else { return Some(Layout::new()) };
    let mut end = 0;
    let mut layout = Layout::new();
    for param in list.split_once(')')?.0.split(',').filter(|param| !param.trim().is_empty()) {
        let mut words = param.split_whitespace().skip_while(|word| *word != ".param").skip(1).peekable();
        let mut align = 0;
        let mut size = 0;
        while let Some(word) = words.next() {
            match word {
                ".align" if size == 0 => align = words.next()?.parse().ok()?,
                _ if size == 0 && word.starts_with(['.']) => {
                    size = word.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().ok()? / 8;
                }
                _ => {}
            }
        }
        align = align.max(size).max(1);
        if let Some((_, length)) = param.split_once('[') {
            size *= length.split(']').next()?.trim().parse::<usize>().ok()?;
        }
        let offset = usize::next_multiple_of(end, align);
        layout.push((offset, size));
        end = offset + size;
    }
    Some(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_a_text() {
        let text = ".visible .entry other(.param .u8 a)\n.visible .entry k (\n .param .u8 k_0,\n \
                    .param .u64 .ptr .global .align 16 k_1,\n .param .align 64 .b8 k_2[128],\n .param .f32 k_3\n)\n{}\n\
                    .entry none .reqntid 32 {}";
        assert_eq!(of_text(text, "k").unwrap(), [(0, 1), (8, 8), (64, 128), (192, 4)]);
        assert_eq!(of_text(text, "none").unwrap(), []);
        assert_eq!(of_text(text, "othe"), None);
    }

    #[test]
    fn parameters_in_one_piece() {
        let (data, size) = ([3u8; 12], 12usize);
        let extra: [*const c_void; 5] =
            [2 as _, (&raw const size).cast(), 1 as _, data.as_ptr().cast(), std::ptr::null()];
        // SAFETY: a list as programs pass it.
        unsafe {
            assert_eq!(packed(extra.as_ptr()), data.as_ptr());
            assert!(packed(std::ptr::null()).is_null() && packed(extra[4..].as_ptr()).is_null());
        }
    }
}
