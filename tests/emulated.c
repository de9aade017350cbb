/* Makes recorded calls of the compiled loops, to run them under an emulator of another processor.

   Standard input has the calls: the number of a function, and its arguments. Standard output gets the
   memory of all outputs after each call. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int outpace_has_isa(int isa);
int outpace_multiply(int kind, int isa, const char *x, long rows, long units, const char *tiles, long outputs,
                     const float *scale, const float *bias, void *out, int threads);
int outpace_pack(int kind, const uint8_t *const *rows, long outputs, long inputs, uint8_t *tiles, int threads);
void outpace_unpack(int kind, uint8_t *tiles, long inputs, const int64_t *numbers, long count, float *out,
                    int threads);
int outpace_multiply_packed(int isa, const void *parts, int count, const float *x, long rows, long inputs,
                            long outputs, const float *bias, float *out, int threads);
void outpace_round_int4(const float *from, long blocks, uint8_t *to, int threads);
void outpace_attend(const void *pass);
void outpace_recur(const void *pass);

enum { NUMBER, ARRAY, OUTPUT };
enum { MOST = 24 };

/* An argument, or a field of a struct: a number, or an array in memory. */
union argument {
    long number;
    void *array;
};

static struct {
    void *array;
    long bytes;
} outputs[MOST];
static int num_outputs;

static long read_number(void) {
    long number;
    if (fread(&number, sizeof number, 1, stdin) != 1) exit(2);
    return number;
}

/* Read a number, the size of an output, or an array with the places of its pointers and what they point to. */
static union argument read_argument(void) {
    const long kind = read_number(), number = read_number();
    union argument found = {number};
    if (kind == NUMBER) return found;
    char *array = calloc(1, number + 1);
    found.array = array;
    if (kind == OUTPUT) {
        outputs[num_outputs].array = array;
        outputs[num_outputs++].bytes = number;
        return found;
    }
    if (number && fread(array, number, 1, stdin) != 1) exit(2);
    for (long left = read_number(); left; left--) {
        const long place = read_number();
        const union argument pointer = read_argument();
        memcpy(array + place, &pointer, sizeof pointer);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count != 2 || !outpace_has_isa(atoi(arguments[1]))) return 3;
    for (long function; (function = read_number());) {
        union argument a[MOST];
        num_outputs = 0;
        const long given = read_number();
        for (long n = 0; n < given; n++) a[n] = read_argument();
        switch (function) {
            case 1:
                outpace_multiply(a[0].number, a[1].number, a[2].array, a[3].number, a[4].number, a[5].array,
                                 a[6].number, a[7].array, a[8].array, a[9].array, a[10].number);
                break;
            case 2:
                outpace_pack(a[0].number, a[1].array, a[2].number, a[3].number, a[4].array, a[5].number);
                break;
            case 3:
                outpace_unpack(a[0].number, a[1].array, a[2].number, a[3].array, a[4].number, a[5].array,
                               a[6].number);
                break;
            case 4:
                outpace_multiply_packed(a[0].number, a[1].array, a[2].number, a[3].array, a[4].number,
                                        a[5].number, a[6].number, a[7].array, a[8].array, a[9].number);
                break;
            case 5: outpace_round_int4(a[0].array, a[1].number, a[2].array, a[3].number); break;
            case 6: outpace_attend(a[0].array); break;
            case 7: outpace_recur(a[0].array); break;
        }
        for (int n = 0; n < num_outputs; n++) fwrite(outputs[n].array, 1, outputs[n].bytes, stdout);
    }
    return 0;
}
