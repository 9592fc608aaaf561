// Register lists for ptx/wgmma.cuh: for each N (8, 16 ... 256) the N / 2 accumulators as text and as operands, and the
// numbers of the operands that follow them.
#pragma once

#define PTX_LIST_8 "%0, %1, %2, %3"
#define PTX_LIST_16 PTX_LIST_8 ", %4, %5, %6, %7"
#define PTX_LIST_24 PTX_LIST_16 ", %8, %9, %10, %11"
#define PTX_LIST_32 PTX_LIST_24 ", %12, %13, %14, %15"
#define PTX_LIST_40 PTX_LIST_32 ", %16, %17, %18, %19"
#define PTX_LIST_48 PTX_LIST_40 ", %20, %21, %22, %23"
#define PTX_LIST_56 PTX_LIST_48 ", %24, %25, %26, %27"
#define PTX_LIST_64 PTX_LIST_56 ", %28, %29, %30, %31"
#define PTX_LIST_72 PTX_LIST_64 ", %32, %33, %34, %35"
#define PTX_LIST_80 PTX_LIST_72 ", %36, %37, %38, %39"
#define PTX_LIST_88 PTX_LIST_80 ", %40, %41, %42, %43"
#define PTX_LIST_96 PTX_LIST_88 ", %44, %45, %46, %47"
#define PTX_LIST_104 PTX_LIST_96 ", %48, %49, %50, %51"
#define PTX_LIST_112 PTX_LIST_104 ", %52, %53, %54, %55"
#define PTX_LIST_120 PTX_LIST_112 ", %56, %57, %58, %59"
#define PTX_LIST_128 PTX_LIST_120 ", %60, %61, %62, %63"
#define PTX_LIST_136 PTX_LIST_128 ", %64, %65, %66, %67"
#define PTX_LIST_144 PTX_LIST_136 ", %68, %69, %70, %71"
#define PTX_LIST_152 PTX_LIST_144 ", %72, %73, %74, %75"
#define PTX_LIST_160 PTX_LIST_152 ", %76, %77, %78, %79"
#define PTX_LIST_168 PTX_LIST_160 ", %80, %81, %82, %83"
#define PTX_LIST_176 PTX_LIST_168 ", %84, %85, %86, %87"
#define PTX_LIST_184 PTX_LIST_176 ", %88, %89, %90, %91"
#define PTX_LIST_192 PTX_LIST_184 ", %92, %93, %94, %95"
#define PTX_LIST_200 PTX_LIST_192 ", %96, %97, %98, %99"
#define PTX_LIST_208 PTX_LIST_200 ", %100, %101, %102, %103"
#define PTX_LIST_216 PTX_LIST_208 ", %104, %105, %106, %107"
#define PTX_LIST_224 PTX_LIST_216 ", %108, %109, %110, %111"
#define PTX_LIST_232 PTX_LIST_224 ", %112, %113, %114, %115"
#define PTX_LIST_240 PTX_LIST_232 ", %116, %117, %118, %119"
#define PTX_LIST_248 PTX_LIST_240 ", %120, %121, %122, %123"
#define PTX_LIST_256 PTX_LIST_248 ", %124, %125, %126, %127"

#define PTX_DATA_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define PTX_DATA_16 PTX_DATA_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define PTX_DATA_24 PTX_DATA_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define PTX_DATA_32 PTX_DATA_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define PTX_DATA_40 PTX_DATA_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define PTX_DATA_48 PTX_DATA_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define PTX_DATA_56 PTX_DATA_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define PTX_DATA_64 PTX_DATA_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define PTX_DATA_72 PTX_DATA_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define PTX_DATA_80 PTX_DATA_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define PTX_DATA_88 PTX_DATA_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define PTX_DATA_96 PTX_DATA_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define PTX_DATA_104 PTX_DATA_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define PTX_DATA_112 PTX_DATA_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define PTX_DATA_120 PTX_DATA_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define PTX_DATA_128 PTX_DATA_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PTX_DATA_136 PTX_DATA_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define PTX_DATA_144 PTX_DATA_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define PTX_DATA_152 PTX_DATA_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define PTX_DATA_160 PTX_DATA_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define PTX_DATA_168 PTX_DATA_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define PTX_DATA_176 PTX_DATA_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define PTX_DATA_184 PTX_DATA_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define PTX_DATA_192 PTX_DATA_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define PTX_DATA_200 PTX_DATA_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define PTX_DATA_208 PTX_DATA_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define PTX_DATA_216 PTX_DATA_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define PTX_DATA_224 PTX_DATA_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define PTX_DATA_232 PTX_DATA_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define PTX_DATA_240 PTX_DATA_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define PTX_DATA_248 PTX_DATA_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define PTX_DATA_256 PTX_DATA_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// X(N, numbers of the seven operands after the accumulators), for the multiples of 32, then of 16 alone, then of 8 alone
#define PTX_WGMMA_SIZES_OF_32(X) \
  X(32, 16, 17, 18, 19, 20, 21, 22) \
  X(64, 32, 33, 34, 35, 36, 37, 38) \
  X(96, 48, 49, 50, 51, 52, 53, 54) \
  X(128, 64, 65, 66, 67, 68, 69, 70) \
  X(160, 80, 81, 82, 83, 84, 85, 86) \
  X(192, 96, 97, 98, 99, 100, 101, 102) \
  X(224, 112, 113, 114, 115, 116, 117, 118) \
  X(256, 128, 129, 130, 131, 132, 133, 134)
#define PTX_WGMMA_SIZES_OF_16(X) \
  X(16, 8, 9, 10, 11, 12, 13, 14) \
  X(48, 24, 25, 26, 27, 28, 29, 30) \
  X(80, 40, 41, 42, 43, 44, 45, 46) \
  X(112, 56, 57, 58, 59, 60, 61, 62) \
  X(144, 72, 73, 74, 75, 76, 77, 78) \
  X(176, 88, 89, 90, 91, 92, 93, 94) \
  X(208, 104, 105, 106, 107, 108, 109, 110) \
  X(240, 120, 121, 122, 123, 124, 125, 126)
#define PTX_WGMMA_SIZES_OF_8(X) \
  X(8, 4, 5, 6, 7, 8, 9, 10) \
  X(24, 12, 13, 14, 15, 16, 17, 18) \
  X(40, 20, 21, 22, 23, 24, 25, 26) \
  X(56, 28, 29, 30, 31, 32, 33, 34) \
  X(72, 36, 37, 38, 39, 40, 41, 42) \
  X(88, 44, 45, 46, 47, 48, 49, 50) \
  X(104, 52, 53, 54, 55, 56, 57, 58) \
  X(120, 60, 61, 62, 63, 64, 65, 66) \
  X(136, 68, 69, 70, 71, 72, 73, 74) \
  X(152, 76, 77, 78, 79, 80, 81, 82) \
  X(168, 84, 85, 86, 87, 88, 89, 90) \
  X(184, 92, 93, 94, 95, 96, 97, 98) \
  X(200, 100, 101, 102, 103, 104, 105, 106) \
  X(216, 108, 109, 110, 111, 112, 113, 114) \
  X(232, 116, 117, 118, 119, 120, 121, 122) \
  X(248, 124, 125, 126, 127, 128, 129, 130)
