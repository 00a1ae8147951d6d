/* Small dense products that stay in the nearest cache, on vectors of whatever length the machine has. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define BAND 6 /* rows whose sums are held in registers, two vectors each */

typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#ifdef SINGLE
typedef int lanes __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef long long lanes __attribute__((vector_size(VECTOR_BYTES)));
#endif

typedef struct {
    const REAL *at;
    size_t row, column; /* how far apart: a transposed matrix is one with the two exchanged */
} Strided;

#define KERNEL(NAME, ROWS, VECTORS)                                                                               \
    static inline __attribute__((always_inline)) void NAME(int depth, Strided a, const REAL *b, size_t b_row,     \
                                                           REAL *c, size_t c_row, int fresh) {                    \
        vec sum[ROWS][VECTORS];                                                                                   \
        for (int i = 0; i < ROWS; i++)                                                                            \
            for (int j = 0; j < VECTORS; j++) sum[i][j] = fresh ? (vec){0} : ((const vec *)(c + i * c_row))[j];   \
        for (int p = 0; p < depth; p++) {                                                                         \
            vec row[VECTORS];                                                                                     \
            for (int j = 0; j < VECTORS; j++) row[j] = ((const vec *)(b + p * b_row))[j];                         \
            for (int i = 0; i < ROWS; i++)                                                                        \
                for (int j = 0; j < VECTORS; j++) sum[i][j] += a.at[i * a.row + p * a.column] * row[j];           \
        }                                                                                                         \
        for (int i = 0; i < ROWS; i++)                                                                            \
            for (int j = 0; j < VECTORS; j++) ((vec *)(c + i * c_row))[j] = sum[i][j];                            \
    }
KERNEL(kernel_6x2, 6, 2)
KERNEL(kernel_4x2, 4, 2)
KERNEL(kernel_2x2, 2, 2)
KERNEL(kernel_6x1, 6, 1)

/* One row: as many sums at once as the processor needs to be busy. */
#define ROW_KERNEL(NAME, VECTORS, APART)                                                                          \
    static inline __attribute__((always_inline)) void NAME(int depth, Strided a, const REAL *b, size_t b_row,     \
                                                           REAL *c, int fresh) {                                  \
        vec sum[APART][VECTORS] = {0};                                                                            \
        int p = 0;                                                                                                \
        for (int j = 0; j < VECTORS && !fresh; j++) sum[0][j] = ((const vec *)c)[j];                              \
        for (; p + APART <= depth; p += APART)                                                                    \
            for (int u = 0; u < APART; u++)                                                                       \
                for (int j = 0; j < VECTORS; j++)                                                                 \
                    sum[u][j] += a.at[(p + u) * a.column] * ((const vec *)(b + (p + u) * b_row))[j];              \
        for (; p < depth; p++)                                                                                    \
            for (int j = 0; j < VECTORS; j++) sum[0][j] += a.at[p * a.column] * ((const vec *)(b + p * b_row))[j]; \
        for (int j = 0; j < VECTORS; j++) {                                                                       \
            for (int u = 1; u < APART; u++) sum[0][j] += sum[u][j];                                               \
            ((vec *)c)[j] = sum[0][j];                                                                            \
        }                                                                                                         \
    }
ROW_KERNEL(row_4, 4, 2)
ROW_KERNEL(row_2, 2, 4)
ROW_KERNEL(row_1, 1, 4)

/* c (n) = a (depth) b, or += if not fresh. */
static void row_product(int n, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, int fresh) {
    int j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) row_4(depth, a, b + j, b_row, c + j, fresh);
    for (; j + 2 * LANES <= n; j += 2 * LANES) row_2(depth, a, b + j, b_row, c + j, fresh);
    for (; j + LANES <= n; j += LANES) row_1(depth, a, b + j, b_row, c + j, fresh);
    for (; j < n; j++) {
        REAL sum = fresh ? 0 : c[j];
        for (int p = 0; p < depth; p++) sum += a.at[p * a.column] * b[p * b_row + j];
        c[j] = sum;
    }
}

static inline Strided below(Strided a, int rows) { return (Strided){a.at + rows * a.row, a.row, a.column}; }

/* c (rows x n) = a (rows x depth) b, or += if not fresh; at most BAND rows. */
static void band(int rows, int n, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row, int fresh) {
    int j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        int i = 0;
        if (rows == 6) kernel_6x2(depth, a, b + j, b_row, c + j, c_row, fresh), i = 6;
        if (i + 4 <= rows) kernel_4x2(depth, a, b + j, b_row, c + j, c_row, fresh), i = 4;
        if (i + 2 <= rows) kernel_2x2(depth, below(a, i), b + j, b_row, c + i * c_row + j, c_row, fresh), i += 2;
        if (i < rows) row_2(depth, below(a, i), b + j, b_row, c + i * c_row + j, fresh);
    }
    for (; j + LANES <= n; j += LANES) {
        int i = 0;
        if (rows == 6) kernel_6x1(depth, a, b + j, b_row, c + j, c_row, fresh), i = 6;
        for (; i < rows; i++) row_1(depth, below(a, i), b + j, b_row, c + i * c_row + j, fresh);
    }
    for (; j < n; j++)
        for (int i = 0; i < rows; i++) {
            REAL sum = fresh ? 0 : c[i * c_row + j];
            for (int p = 0; p < depth; p++) sum += a.at[i * a.row + p * a.column] * b[p * b_row + j];
            c[i * c_row + j] = sum;
        }
}

static int band_of(int m, int i) { return m - i < BAND ? m - i : BAND; }

/* c (m x n) = a (m x depth) b (depth x n), or += if not fresh. */
static void product(int m, int n, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row, int fresh) {
    for (int i = 0; i < m; i += BAND)
        band(band_of(m, i), n, depth, below(a, i), b, b_row, c + i * c_row, c_row, fresh);
}

/* The same for c (m x (offset + m)) that is only needed up to its diagonal, which stands `offset` columns in; what
 * lies a little beyond is written too, in whole vectors. */
static void product_below(int m, int offset, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row) {
    for (int i = 0; i < m; i += BAND) {
        int needed = offset + i + band_of(m, i), n = (needed + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        band(band_of(m, i), n < offset + m ? n : offset + m, depth, below(a, i), b, b_row, c + i * c_row, c_row, 1);
    }
}

/* The same for a whose last m columns are lower triangular, zeros stored above. */
static void lower_product(int m, int n, int offset, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row,
                          int fresh) {
    for (int i = 0; i < m; i += BAND)
        band(band_of(m, i), n, offset + i + band_of(m, i), below(a, i), b, b_row, c + i * c_row, c_row, fresh);
}

/* c += a^T b for a lower triangular a (m x m), zeros stored above. */
static void lower_transposed_product(int m, int n, const REAL *a, size_t a_row, const REAL *b, size_t b_row, REAL *c,
                                     size_t c_row) {
    for (int i = 0; i < m; i += BAND) {
        Strided part = {a + i * a_row + i, 1, a_row};
        band(band_of(m, i), n, m - i, part, b + i * b_row, b_row, c + i * c_row, c_row, 0);
    }
}

static inline Strided plain(const REAL *a, size_t row) { return (Strided){a, row, 1}; }
static inline Strided turned(const REAL *a, size_t row) { return (Strided){a, 1, row}; }

/* b = a^T for as many rows and columns as a vector has numbers */
static inline void turn_square(const REAL *restrict a, size_t a_row, REAL *restrict b, size_t b_row) {
#if defined(__clang__)
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) b[j * b_row + i] = a[i * a_row + j];
#else
    vec row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = *(const vec *)(a + i * a_row);
#pragma GCC unroll 4
    for (int apart = 1; apart < LANES; apart *= 2) {
        lanes low, high;
        for (int k = 0; k < LANES; k++) {
            low[k] = k & apart ? LANES + k - apart : k;
            high[k] = k & apart ? LANES + k : k + apart;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & apart)) {
                vec x = row[i], y = row[i + apart];
                row[i] = __builtin_shuffle(x, y, low);
                row[i + apart] = __builtin_shuffle(x, y, high);
            }
    }
    for (int i = 0; i < LANES; i++) *(vec *)(b + i * b_row) = row[i];
#endif
}

/* b (n x m) = a^T for a (m x n) */
static void transpose(int m, int n, const REAL *restrict a, size_t a_row, REAL *restrict b, size_t b_row) {
    int rows = m / LANES * LANES, columns = n / LANES * LANES;
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < columns; j += LANES) turn_square(a + i * a_row + j, a_row, b + j * b_row + i, b_row);
    for (int i = 0; i < m; i++)
        for (int j = i < rows ? columns : 0; j < n; j++) b[j * b_row + i] = a[i * a_row + j];
}

/* to (rows) = w (rows x n) x */
static void row_dots(int rows, int n, const REAL *w, const REAL *x, REAL *to) {
    REAL sums[LANES * LANES] __attribute__((aligned(64))), columns[LANES * LANES] __attribute__((aligned(64)));
    int o = 0;
    for (; o + LANES <= rows && n >= LANES; o += LANES) {
        for (int r = 0; r < LANES; r++) {
            const REAL *row = w + (size_t)(o + r) * n;
            vec sum = {0}, other = {0};
            int i = 0;
            for (; i + 2 * LANES <= n; i += 2 * LANES) {
                sum += *(const vec *)(row + i) * *(const vec *)(x + i);
                other += *(const vec *)(row + i + LANES) * *(const vec *)(x + i + LANES);
            }
            for (; i + LANES <= n; i += LANES) sum += *(const vec *)(row + i) * *(const vec *)(x + i);
            *(vec *)(sums + r * LANES) = sum + other;
        }
        turn_square(sums, LANES, columns, LANES);
        vec sum = *(vec *)columns;
        for (int i = 1; i < LANES; i++) sum += *(vec *)(columns + i * LANES);
        *(vec *)(to + o) = sum;
        for (int i = n / LANES * LANES; i < n; i++)
            for (int r = 0; r < LANES; r++) to[o + r] += w[(size_t)(o + r) * n + i] * x[i];
    }
    for (; o < rows; o++) {
        REAL sum = 0;
        for (int i = 0; i < n; i++) sum += w[(size_t)o * n + i] * x[i];
        to[o] = sum;
    }
}
