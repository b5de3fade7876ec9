// Tile registers: their shapes, and the system's permission to use them.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int row_count, int bytes) { rows[tile] = row_count, row_bytes[tile] = bytes; }
    void use() const { _tile_loadconfig(this); }
};

// Linux hands out tile registers on request only, once per process.
static inline bool tiles_allowed() {
    constexpr long request_permission = 0x1023, tile_data = 18;
    static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return allowed;
}
