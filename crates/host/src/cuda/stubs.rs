//! Stubs for host headers: the types, macros and names that device code takes from these headers.

use std::collections::BTreeMap;

/// Fixed-width integers, defined as in CUDA's headers for NVRTC.
const STDINT: &str = "#pragma once
#if __has_include(<cuda/std/cstdint>)
#include <cuda/std/cstdint>
#else
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int8_t int_least8_t; typedef int16_t int_least16_t; typedef int32_t int_least32_t;
typedef int64_t int_least64_t; typedef uint8_t uint_least8_t; typedef uint16_t uint_least16_t;
typedef uint32_t uint_least32_t; typedef uint64_t uint_least64_t;
typedef int64_t intptr_t; typedef uint64_t uintptr_t; typedef int64_t intmax_t; typedef uint64_t uintmax_t;
#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MIN (-32768)
#define INT16_MAX 32767
#define UINT16_MAX 65535
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295u
#define INT64_MIN (-9223372036854775807ll - 1)
#define INT64_MAX 9223372036854775807ll
#define UINT64_MAX 18446744073709551615ull
#endif
namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t;
}
";

const LIMITS: &str = "#pragma once
#if __has_include(<cuda/std/climits>)
#include <cuda/std/climits>
#else
#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-2147483647 - 1)
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define LONG_MIN (-9223372036854775807l - 1)
#define LONG_MAX 9223372036854775807l
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MIN (-9223372036854775807ll - 1)
#define LLONG_MAX 9223372036854775807ll
#define ULLONG_MAX 18446744073709551615ull
#endif
";

const FLOAT: &str = "#pragma once
#if __has_include(<cuda/std/cfloat>)
#include <cuda/std/cfloat>
#else
#define FLT_RADIX 2
#define FLT_MANT_DIG 24
#define DBL_MANT_DIG 53
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#endif
";

const MATH: &str = "#pragma once
namespace std { typedef decltype(sizeof(0)) size_t; }
typedef unsigned int uint; typedef unsigned short ushort; typedef unsigned long ulong;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef HUGE_VALF
#define HUGE_VALF INFINITY
#endif
#ifndef M_PI
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#endif
";

const ASSERT: &str = "#undef assert
#ifdef NDEBUG
#define assert(e) ((void)0)
#else
#define assert(e) ((e) ? (void)0 : __assertfail(#e, __FILE__, __LINE__, __func__, 1))
#endif
";

const STDDEF: &str = "#pragma once
#ifndef NULL
#define NULL 0
#endif
#ifndef offsetof
#define offsetof(type, member) __builtin_offsetof(type, member)
#endif
";

const STRING: &str = "#pragma once
namespace std { using ::memcpy; using ::memset; }
";

const STDIO: &str = "#pragma once
namespace std { using ::printf; }
";

/// Headers of the C++ library that libcu++ has for device code.
const LIBCUXX: [&str; 20] = [
    "algorithm",
    "array",
    "bit",
    "chrono",
    "cmath",
    "complex",
    "concepts",
    "functional",
    "initializer_list",
    "iterator",
    "limits",
    "numeric",
    "optional",
    "ratio",
    "span",
    "string_view",
    "tuple",
    "type_traits",
    "utility",
    "variant",
];

/// CUB's headers for device code. NVRTC rejects `cub/cub.cuh`, which includes all headers.
const CUB: [&str; 16] = [
    "block/block_adjacent_difference",
    "block/block_discontinuity",
    "block/block_exchange",
    "block/block_histogram",
    "block/block_load",
    "block/block_merge_sort",
    "block/block_radix_sort",
    "block/block_reduce",
    "block/block_scan",
    "block/block_shuffle",
    "block/block_store",
    "warp/warp_exchange",
    "warp/warp_load",
    "warp/warp_reduce",
    "warp/warp_scan",
    "warp/warp_store",
];

/// Headers from which device code uses nothing.
const EMPTY: [&str; 56] = [
    "thrust/copy.h",
    "thrust/device_ptr.h",
    "thrust/device_vector.h",
    "thrust/execution_policy.h",
    "thrust/fill.h",
    "thrust/host_vector.h",
    "thrust/reduce.h",
    "thrust/scan.h",
    "thrust/sort.h",
    "thrust/transform.h",
    "stdlib.h",
    "cstdlib",
    "time.h",
    "ctime",
    "unistd.h",
    "sys/time.h",
    "sys/types.h",
    "sys/stat.h",
    "fcntl.h",
    "errno.h",
    "cerrno",
    "stdarg.h",
    "cstdarg",
    "stdbool.h",
    "signal.h",
    "getopt.h",
    "vector",
    "string",
    "iostream",
    "ostream",
    "istream",
    "fstream",
    "sstream",
    "iomanip",
    "map",
    "unordered_map",
    "set",
    "unordered_set",
    "list",
    "deque",
    "queue",
    "stack",
    "random",
    "thread",
    "mutex",
    "condition_variable",
    "future",
    "memory",
    "stdexcept",
    "exception",
    "regex",
    "filesystem",
    "cstdio_ext",
    "omp.h",
    "cuda_profiler_api.h",
    "nvToolsExt.h",
];

/// The stubs, by the name in `#include`. Without CUDA's headers, the headers of the CUDA runtime are stubs
/// too: NVRTC itself knows their types in device code.
pub(super) fn known(without_cuda: bool) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    let mut add = |names: &[&str], text: &str| {
        all.extend(names.iter().map(|name| ((*name).to_owned(), text.to_owned())));
    };
    add(&["stdint.h", "cstdint", "inttypes.h", "cinttypes"], STDINT);
    add(&["limits.h", "climits"], LIMITS);
    add(&["float.h", "cfloat"], FLOAT);
    add(&["math.h"], MATH);
    add(&["assert.h", "cassert"], ASSERT);
    add(&["stddef.h", "cstddef"], STDDEF);
    add(&["string.h", "cstring"], STRING);
    add(&["stdio.h", "cstdio"], STDIO);
    add(&EMPTY, "");
    if !without_cuda {
        let cub: String = CUB.iter().map(|name| format!("#include <cub/{name}.cuh>\n")).collect();
        add(&["cub/cub.cuh"], &cub);
        // These library headers include the headers of their argument types.
        let types = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n";
        add(&["cublas_v2.h", "cublasLt.h", "cublas.h", "cudnn.h"], types);
    }
    for name in LIBCUXX {
        let math = if name == "cmath" { MATH } else { "#pragma once\n" };
        let text = format!(
            "{math}#if __has_include(<cuda/std/{name}>)\n#include <cuda/std/{name}>\n\
             namespace std {{ using namespace cuda::std; }}\n#endif\n"
        );
        add(&[name], &text);
    }
    if without_cuda {
        add(
            &[
                "cuda.h",
                "cuda_runtime.h",
                "cuda_runtime_api.h",
                "device_launch_parameters.h",
                "driver_types.h",
            ],
            "",
        );
    }
    all
}

/// The text for a missing header. Those of PyTorch include the headers of types that device code takes from
/// them.
pub(super) fn missing(header: &str) -> String {
    if !["torch/", "ATen/", "c10/"].iter().any(|folder| header.starts_with(folder)) {
        return String::new();
    }
    let includes = ["cfloat", "cmath", "cstdint", "limits", "cuda_fp16.h", "cuda_bf16.h"];
    let include = |name| format!("#if __has_include(<{name}>)\n#include <{name}>\n#endif\n");
    includes.map(include).concat()
}

/// Whether a missing header is known to be a host header, even when it is included in quotes.
pub(super) fn is_host(header: &str) -> bool {
    const NAMES: [&str; 14] = [
        "helper_",
        "exception.h",
        "torch/",
        "ATen/",
        "c10/",
        "pybind11/",
        "cublas",
        "cudnn",
        "cusolver",
        "cusparse",
        "cufft",
        "nccl",
        "mpi",
        "nvml",
    ];
    NAMES.iter().any(|name| header.starts_with(name))
}
